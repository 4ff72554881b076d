"""`QuantizedTensor` against the formula, element by element; cutting it before or after is one."""

import numpy as np
import pytest

from ridgeline.core.arrays import numpy_dtype
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.quant import QuantizedTensor, stack, tensor


def make(
    out: int, inputs: int, rows: int | None, columns: int | None, *, zeros: bool, experts: int = 0
) -> QuantizedTensor:
    generator = np.random.default_rng(out * 31 + inputs)
    lead = (experts,) if experts else ()
    grid = (*lead, ceil_div(out, rows or out), ceil_div(inputs, columns or inputs))
    return QuantizedTensor(
        format=NumberFormat(
            name="test",
            bits=4,
            is_float=False,
            group_rows=rows,
            group_size=columns,
            scale_bits=16,
            zero_bits=4 if zeros else 0,
        ),
        codes=generator.integers(0, 16, (*lead, out, inputs), dtype=np.uint8),
        scales=generator.random(grid, dtype=np.float32) + np.float32(0.5),
        zeros=generator.integers(0, 16, grid, dtype=np.uint8) if zeros else None,
    )


def by_hand(weight: QuantizedTensor) -> np.ndarray:
    rows, columns = weight.block
    out = np.empty(weight.shape)
    for o in range(out.shape[-2]):
        for i in range(out.shape[-1]):
            group = i // columns if weight.group_of is None else int(weight.group_of[i])
            code = weight.codes[..., o, i].astype(np.float64)
            if weight.table is not None:
                code = weight.table[weight.codes[..., o, i]].astype(np.float64)
            if weight.zeros is not None:
                code = code - weight.zeros[..., o // rows, group]
            out[..., o, i] = code * weight.scales[..., o // rows, group]
    return out


BLOCKS = [(1, 4), (1, None), (None, None), (3, 4), (8, 5), (16, 16)]


@pytest.mark.parametrize(("rows", "columns"), BLOCKS)
@pytest.mark.parametrize("zeros", [True, False])
def test_expands_by_the_formula_whatever_the_chunk(
    rows: int | None, columns: int | None, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experts in (0, 2):
        weight = make(11, 13, rows, columns, zeros=zeros, experts=experts)
        expected = by_hand(weight)
        for chunk in (1, 40, 1 << 20):
            monkeypatch.setattr(tensor, "_CHUNK_ELEMENTS", chunk)
            assert np.array_equal(weight.dequantize("float64"), expected)
    assert np.array_equal(
        weight.dequantize("bfloat16"), expected.astype(np.float32).astype(numpy_dtype("bfloat16"))
    )


def test_act_order_and_tables() -> None:
    weight = make(5, 12, 1, 4, zeros=True)
    order = np.array([2, 0, 1, 1, 0, 2, 2, 0, 1, 0, 2, 1])
    shuffled = QuantizedTensor(
        format=weight.format,
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        group_of=order,
    )
    assert np.array_equal(shuffled.dequantize("float64"), by_hand(shuffled))
    table = QuantizedTensor(
        format=weight.format,
        codes=weight.codes,
        scales=weight.scales,
        table=np.linspace(-1, 1, 16, dtype=np.float32),
    )
    assert np.array_equal(table.dequantize("float64"), by_hand(table))


@pytest.mark.parametrize(("rows", "columns"), BLOCKS)
def test_rows_can_be_cut_out_first(rows: int | None, columns: int | None) -> None:
    weight = make(11, 13, rows, columns, zeros=True)
    whole = weight.dequantize("float32")
    for start, stop in [(0, 11), (0, 3), (3, 8), (2, 9), (8, 11), (10, 11)]:
        assert np.array_equal(weight.rows(start, stop).dequantize("float32"), whole[start:stop])
    for first in (0, 1):
        half = weight.every_other_row(first).dequantize("float32")
        assert np.array_equal(half, whole[first::2])


def test_experts_are_stacked() -> None:
    parts = [make(4, 8, 1, 4, zeros=True), make(4, 8, 1, 4, zeros=True)]
    whole = stack(parts)
    assert whole is not None
    assert np.array_equal(
        whole.rows(1, 2).dequantize("float32")[0], by_hand(parts[1]).astype(np.float32)
    )
    assert stack([parts[0], make(4, 8, 1, 2, zeros=True)]) is None


def test_bytes_count_scales_and_zeros() -> None:
    assert make(8, 32, 1, 16, zeros=True).num_bytes == 8 * 32 * (4 + 20 / 16) / 8
    assert make(8, 32, None, None, zeros=False).num_bytes == 8 * 32 / 2 + 2
