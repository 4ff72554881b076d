"""Quantized checkpoints keep their codes on the cpu executor, and multiply as what they stand for.

The rows of a packed matrix differ from the dequantized ones by the rounding of scales and minimums
to half precision. A product differs further by the rounding of activations to eight bits: half a
step of max|x| / 127 for each column, times what its code stands for.
"""

import logging
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tests.parity.ours import run
from tests.weights.gguf_export import export, write_checkpoint
from tests.weights.test_gguf_models import CASES, TOKENS

from ridgeline.core.arrays import cast
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.engine.loading import load_model
from ridgeline.executors.cpu.codes import matrix_codes, pack_matrix_codes
from ridgeline.executors.cpu.weights import pack_weights
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.kernels.cpu.pool import shared_pool
from ridgeline.quant import GGUFBlocks, QuantizedTensor
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.weights import expanded_weights

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")

FOLDERS = sorted((Path(__file__).parents[1] / "data" / "quantized").iterdir())
# What is expanded: codes into tables, and floats.
EXPANDED = ("float8", "nf4", "fp4", "mxfp4", "mxfp8", "nvfp4")
HALF = 2.0**-11  # relative error of a rounded half
GGUF = {
    kind: number
    for number, kind in ((n, f.name) for n, f in GGUF_FORMATS.items())
    if kind
    in (
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "TQ1_0",
        "TQ2_0",
    )
}


def matrices(weight: QuantizedTensor | GGUFBlocks) -> list[QuantizedTensor | GGUFBlocks]:
    """A stack's, or the weight alone."""
    if len(weight.shape) == 2:
        return [weight]
    return [weight.entry(index) for index in range(weight.shape[0])]


def check(weight: QuantizedTensor | GGUFBlocks) -> None:
    """Rows and products of a weight's own codes against its dequantized values."""
    pool, rng = shared_pool(), np.random.default_rng(0)
    for part in matrices(weight):
        w_RC = part.dequantize("float32")
        rows, columns = w_RC.shape
        found = matrix_codes(part)
        assert found is not None
        _, _, mins, _ = found.rows(slice(0, rows))
        matrix = pack_matrix_codes(pool, found)
        group = matrix.struct.group
        mins_RC = np.zeros_like(w_RC)
        if mins is not None:
            mins_RC = np.repeat(mins, group, axis=1)[:, :columns]
        size_RC = np.abs(w_RC) + 2 * np.abs(mins_RC)
        found = matrix.unpack(pool, np.arange(rows, dtype=np.int32))
        assert (np.abs(found - w_RC) <= HALF * size_RC * 1.01 + 1e-30).all()
        for tokens in (1, 5):
            x_TC = rng.standard_normal((tokens, columns)).astype(np.float32)
            wanted = x_TC.astype(np.float64) @ w_RC.T.astype(np.float64)
            step_T = np.abs(x_TC).max(axis=1) / 127 / 2
            bound = step_T[:, None] * size_RC.sum(axis=1) + 2 * HALF * np.abs(x_TC) @ size_RC.T
            assert (np.abs(matrix.matmul(pool, x_TC) - wanted) <= bound * 1.01 + 1e-30).all()
            assert (bound < 0.1 * np.abs(x_TC).max() * size_RC.sum(axis=1) + 1e-30).all()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_checkpoints_of_the_libraries(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(EngineConfig(model=str(folder), dtype="float32")).model
    stored = {n: w for n, w in model.weights.items() if not isinstance(w, np.ndarray)}
    kept = {n: w for n, w in stored.items() if None not in map(matrix_codes, matrices(w))}
    for weight in list(kept.values())[:4]:
        check(weight)
    with caplog.at_level(logging.WARNING):
        packed = pack_weights(shared_pool(), model)
    names = {w.format.name for n, w in stored.items() if n not in kept}
    told = [line for line in caplog.messages if "expands" in line]
    assert len(told) == bool(names)
    assert all(name in told[0] for name in names)
    in_order = all(getattr(w, "group_of", None) is None for w in stored.values())
    floats = all(name.startswith(EXPANDED) for name in names)
    assert floats if in_order else kept.keys() != stored.keys()
    dense = expanded_weights(model.weights, "float32")
    for name in stored.keys() - kept.keys() & packed.matrices.keys():
        rows = np.arange(dense[name].shape[-2], dtype=np.int32)
        part = dense[name] if dense[name].ndim == 2 else dense[name][0]
        assert np.array_equal(packed.matrices[name][0].unpack(shared_pool(), rows), part), name


@pytest.mark.parametrize("kind", GGUF)
@pytest.mark.parametrize("stacked", [False, True])
def test_blocks_of_gguf(kind: str, stacked: bool) -> None:
    number, rng = GGUF[kind], np.random.default_rng(1)
    form, shape = GGUF_FORMATS[number], (3, 37, 512) if stacked else (37, 512)
    if kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):  # the package does not write these
        rows = int(np.prod(shape[:-1]))
        data = rng.integers(0, 256, (rows * 2, form.block_bytes), dtype=np.uint8)
        for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2)):
            scale = rng.uniform(0.001, 0.01, len(data)).astype("<f2")
            data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        data = data.reshape(rows, -1)
    else:
        values = rng.standard_normal(shape).astype(np.float32)
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType(number))
        data = data.reshape(-1, data.shape[-1])
    check(GGUFBlocks(format=form, shape=shape, data=data))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [16, 32, 48, 96, 128, 256, None])
@pytest.mark.parametrize("block_rows", [1, 8, None])
def test_integers_of_any_block(symmetric, bits, size, block_rows) -> None:
    rows, columns = 33, 208
    generator = np.random.default_rng(bits)
    shape = (ceil_div(rows, block_rows or rows), ceil_div(columns, size or columns))
    codes = generator.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
    zeros = generator.integers(0, 2**bits, shape, dtype=np.uint8)
    if symmetric:
        codes = (codes.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)
    form = NumberFormat(
        name="int", bits=bits, is_float=False, group_size=size, group_rows=block_rows, scale_bits=16
    )
    scales = generator.uniform(1e-4, 0.01, shape).astype(np.float32)
    check(
        QuantizedTensor(format=form, codes=codes, scales=scales, zeros=None if symmetric else zeros)
    )


def factored_weight(
    columns: int, *, bits: int = 4, rows: int = 37, seed: int = 0
) -> QuantizedTensor:
    """Scales of 32 columns that are multiples of one of 7 bits for 128 columns, as float16."""
    rng = np.random.default_rng(seed)
    common = rng.integers(64, 128, (rows, ceil_div(columns, 128), 1)) * 2.0**-16
    factors = rng.integers(-15, 17, (rows, common.shape[1], 4))
    scales = (common * factors).reshape(rows, -1)[:, : ceil_div(columns, 32)]
    half = 1 << (bits - 1)
    codes = rng.integers(-half, half, (rows, columns)).astype(np.int8)
    form = NumberFormat(name=f"int{bits}", bits=bits, is_float=False, group_size=32, scale_bits=16)
    return QuantizedTensor(format=form, codes=codes, scales=scales.astype(np.float16))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("columns", [128, 384, 2016])
def test_scales_that_are_multiples_of_one_become_factors(columns, bits) -> None:
    """They take an eighth of a bit less, and the values are those of the file, bit for bit."""
    weight, pool = factored_weight(columns, bits=bits), shared_pool()
    found = matrix_codes(weight)
    assert found is not None and found.form.has_factors
    matrix = pack_matrix_codes(pool, found)
    values = matrix.unpack(pool, np.arange(37, dtype=np.int32))
    assert np.array_equal(values, weight.dequantize("float32"))
    check(weight)
    spread = 1 + np.random.default_rng(1).random(weight.scales.shape) / 64
    plain = replace(weight, scales=(weight.scales * spread).astype(np.float16))
    of_32 = matrix_codes(plain)
    assert of_32 is not None and not of_32.form.has_factors
    assert matrix.num_bytes <= pack_matrix_codes(pool, of_32).num_bytes
    check(plain)


def test_scales_that_only_nearly_have_factors_keep_groups_of_32() -> None:
    weight = factored_weight(256)

    def scales(first, second, rest) -> np.ndarray:
        return np.tile(np.array([first, second, *[rest] * 6], dtype=np.float32), (37, 1))

    for changed in (
        {"scales": cast(weight.scales, "bfloat16")},
        {"scales": cast(scales(1.0, 17.0, 17.0), "float16")},
        {"scales": cast(scales(-16.0, 1.0, 16.0), "float16")},
        {"scales": scales(2.0**-30, 2.0**-30, 2.0**-30)},
        {"zeros": np.full((37, 8), 7, dtype=np.uint8), "codes": weight.codes.view(np.uint8) & 15},
    ):
        found = matrix_codes(replace(weight, **changed))
        assert found is not None and not found.form.has_factors
        check(replace(weight, **changed))


def test_a_ternary_block_with_a_fourth_code_is_expanded() -> None:
    """It stands for 2 d, which two bits around a middle do not hold."""
    form = GGUF_FORMATS[GGUF["TQ2_0"]]
    values = np.random.default_rng(0).integers(-1, 2, (16, 256)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.TQ2_0)
    assert matrix_codes(GGUFBlocks(format=form, shape=values.shape, data=data)) is not None
    data[3, 5] = 0xFF
    odd = GGUFBlocks(format=form, shape=values.shape, data=data)
    assert matrix_codes(odd) is None
    assert odd.dequantize("float32").max() == 2


def test_columns_in_groups_of_eight_or_out_of_order_are_expanded() -> None:
    codes, form = np.zeros((4, 64), dtype=np.int8), {"name": "int4", "bits": 4}
    of_8 = NumberFormat(**form, is_float=False, group_size=8, scale_bits=16)
    of_32 = NumberFormat(**form, is_float=False, group_size=32, scale_bits=16)
    order, ones = np.arange(64) % 2, np.ones((4, 8), dtype=np.float32)
    for weight in (
        QuantizedTensor(format=of_8, codes=codes, scales=ones),
        QuantizedTensor(format=of_32, codes=codes, scales=ones[:, :2], group_of=order),
        QuantizedTensor(format=of_32, codes=codes, scales=ones[:, :2] * np.float32(np.inf)),
    ):
        assert matrix_codes(weight) is None


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    """To the same number of bits only what it left in float is: the head."""
    folder = next(folder for folder in FOLDERS if folder.name == "ct-int4-group")
    model = load_model(EngineConfig(model=str(folder), quantization="int8")).model
    with pytest.raises(SettingsError, match=r"quantized already.*draft_quantization to none"):
        pack_weights(shared_pool(), model)
    plain, alike = (
        pack_weights(
            shared_pool(), load_model(EngineConfig(model=str(folder), quantization=bits)).model
        )
        for bits in (None, "int4")
    )
    head = next(name for name in ("head", "embed") if name in alike.matrices)
    assert set(alike.formats()) - set(plain.formats()) >= {head}
    assert alike.formats()[head].bits == 6
    for name, form in plain.formats().items():
        assert alike.formats()[name] == form
        assert np.array_equal(alike.matrices[name][0].data, plain.matrices[name][0].data)


@pytest.mark.parametrize(
    "name", ["ct-int4-group-asym", "awq-gemm", "gptq-int8", "bnb-int8", "bitnet-bitlinear"]
)
def test_logits_of_a_quantized_checkpoint(name: str) -> None:
    """As the reference executor's on expanded weights, but for activations of eight bits."""
    folder = next(folder for folder in FOLDERS if folder.name == name)
    model = load_model(EngineConfig(model=str(folder), dtype="float32")).model
    tokens = load_file(folder / "expected.safetensors")["token_ids"].tolist()
    found, wanted = (
        run(model, tokens, prompt_tokens=len(tokens) - 3, name=executor)
        for executor in ("cpu", "reference")
    )
    assert np.abs(found - wanted).mean() < 0.03 * wanted.std()


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3", "gpt2"])
def test_logits_of_a_gguf_file(tmp_path: Path, kind: str, family: str) -> None:
    architecture, config = CASES[family]
    write_checkpoint(config, tmp_path / "model")
    path = tmp_path / "model.gguf"
    export(tmp_path / "model", path, architecture, matrices=gguf.GGMLQuantizationType[kind])
    model = load_model(EngineConfig(model=str(path), dtype="float32")).model
    stored = [w for _, w in model.weights.items() if isinstance(w, GGUFBlocks)]
    assert {weight.format.name for weight in stored} == {kind}
    found, wanted = (
        run(model, TOKENS, prompt_tokens=36, name=executor) for executor in ("cpu", "reference")
    )
    assert np.abs(found - wanted).mean() < 0.03 * wanted.std()
