"""Products with plain and packed matrices against float64."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from tests.kernels.triton.device import DEVICE, assert_near, random
from torch.nn import functional
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from ridgeline.core.formats import number_format
from ridgeline.core.spec import Activation, ClampedSwiGLU
from ridgeline.kernels import reference
from ridgeline.kernels.tensors import as_array, as_tensor
from ridgeline.kernels.triton import (
    DeviceMatrix,
    Format,
    LinearConfig,
    Workspace,
    dequantize,
    fp8_matrix,
    kernel_problem,
    linear,
    matmul,
    multiplies_scaled,
    pack_matrix,
    packing,
    quantize_matrix,
    quantize_rows,
    scaled_matmul,
)
from ridgeline.kernels.triton.launch import DeviceLimits
from ridgeline.quant import QuantizedTensor

# The package has a function of that name.
linear_module = import_module("ridgeline.kernels.triton.linear")

COLUMNS = 384


def asymmetric(rows, columns, bits, group):
    """A quantized tensor with zero points, as AWQ and GPTQ have them."""
    generator = torch.Generator().manual_seed(bits + group)
    blocks = (rows, columns // group)
    return QuantizedTensor(
        format=replace(number_format("int4-g128"), group_size=group),
        codes=as_array(
            torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
        ),
        scales=as_array(torch.rand(blocks, generator=generator).half() * 0.02 + 0.01),
        zeros=as_array(torch.randint(0, 1 << bits, blocks, generator=generator, dtype=torch.uint8)),
    )


def matrices(rows, dtype):
    weight = random(rows, COLUMNS, seed=3).cpu()
    zeros4 = asymmetric(rows, COLUMNS, 4, 128)
    zeros_by_row = asymmetric(rows, COLUMNS, 4, COLUMNS)
    found = {
        "plain": (pack_matrix(weight.to(dtype)), weight.to(dtype)),
        "int8": (quantize_matrix(weight, 8), None),
        "int8-g64": (quantize_matrix(weight, 8, 64), None),
        "int4": (quantize_matrix(weight, 4), None),
        "int4-g32": (quantize_matrix(weight, 4, 32), None),
        "int4-g128": (quantize_matrix(weight, 4, 128), None),
        "int4-zeros": (pack_matrix(zeros4), as_tensor(zeros4.dequantize("float64"))),
        "int4-zeros-by-row": (
            pack_matrix(zeros_by_row),
            as_tensor(zeros_by_row.dequantize("float64")),
        ),
        "fp8": (fp8_matrix(weight), None),
    }
    return {name: (packed.to(DEVICE), exact) for name, (packed, exact) in found.items()}


def exact_values(packed, exact):
    """What a packed matrix stands for, in float64."""
    if exact is not None:
        return exact.double()
    columns = packed.shape[1]
    codes = packed.codes.cpu()
    if packed.format is Format.INT4:
        codes = packing.unpack_nibbles(codes, packed.unit).double() - 8
    scales = packed.scales.cpu().double().mT
    return codes.double() * scales.repeat_interleave(columns // scales.shape[1], dim=1)


NAMES = list(matrices(8, torch.float32))


def run(x, packed, outputs, **options):
    out = torch.full((len(x), outputs), float("nan"), dtype=x.dtype, device=DEVICE)
    workspace = Workspace(DEVICE, num_floats=1 << 20)
    linear(x, packed, out, workspace=workspace, **options)
    assert not workspace.counters.any()
    return out


@pytest.mark.parametrize(
    ("dtype", "splits"), [(torch.float32, 4), (torch.float16, 1), (torch.bfloat16, 2)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_small_batches(name, dtype, splits):
    packed, exact = matrices(70, dtype)[name]
    x, bias = random(3, COLUMNS, dtype=dtype), random(70, seed=8, dtype=dtype)
    config = LinearConfig(64, 128, splits, 4, 3)
    found = run(x, packed, 70, bias_O=bias, config=config)
    expected = x.double().cpu() @ exact_values(packed, exact).T + bias.double().cpu()
    assert_near(found, expected, dtype)


def test_quantization_on_load_is_near():
    weight = random(64, COLUMNS).cpu()
    for bits, group, most in ((4, 32, 0.09), (4, 128, 0.11), (8, None, 0.012)):
        packed = quantize_matrix(weight, bits, group)
        error = (exact_values(packed, None) - weight).norm() / weight.norm()
        assert 0 < error < most
        assert packed.bits_per_weight < bits * 1.13


@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_batches_of_all_sizes_and_columns_that_end_within_a_step(tokens):
    x, weight = random(tokens, 200), random(45, 200, seed=1)
    config = LinearConfig(16, 64, 2, 4, 2)
    found = run(x, pack_matrix(weight), 45, config=config)
    assert_near(found, x.double() @ weight.double().T, torch.float32)


@pytest.mark.parametrize("tokens", [20, 100])
@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g128", "int4-zeros", "fp8"])
def test_larger_batches_of_quantized_weights(name, tokens):
    """Scales multiply the weights, and one program has up to 128 tokens."""
    packed, exact = matrices(40, torch.float16)[name]
    x = random(tokens, COLUMNS, dtype=torch.float16)
    expected = x.double().cpu() @ exact_values(packed, exact).T
    assert_near(run(x, packed, 40), expected, torch.float16)


@pytest.mark.parametrize(
    ("columns", "group", "unit"),
    [(96, 32, 32), (192, 32, 64), (320, 64, 64), (96, None, 32), (192, None, 64)],
)
def test_int4_of_any_width_that_is_whole_groups(columns, group, unit):
    packed = quantize_matrix(random(20, columns).cpu(), 4, group)
    assert packed.unit == unit
    exact, packed = exact_values(packed, None), packed.to(DEVICE)
    x, out = random(3, columns), torch.empty(20, columns, device=DEVICE)
    found = run(x, packed, 20, config=LinearConfig(16, 64, 1, 4, 2))
    assert_near(found, x.double().cpu() @ exact.T, torch.float32)
    dequantize(packed, out)
    assert_near(out, exact, torch.float32)


@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_int4_code_is_exact_at_every_place(dtype, group):
    """As bits of a float of its own size, multiplied up; of 8 tokens, and where scales multiply
    the weights."""
    codes = (torch.arange(16)[:, None] + torch.arange(128)).to(torch.uint8) % 16
    scales = torch.ones(16, 128 // (group or 128)).half()
    weight = QuantizedTensor(
        format=replace(number_format("int4-g128"), group_size=group or 128),
        codes=as_array(codes.view(torch.int8) - 8),
        scales=as_array(scales),
    )
    x = torch.eye(128, dtype=dtype, device=DEVICE)
    packed = pack_matrix(weight)
    assert packed.unit == 128
    for each in (8, 128):
        found = torch.cat([run(part, packed.to(DEVICE), 16) for part in x.split(each)])
        assert torch.equal(found.cpu().T.double(), codes.double() - 8)


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_the_order_of_int4_codes(unit):
    """Pair i of word B t + b of a unit is columns 8 (B i + b) + 2 t and the next."""
    codes = torch.randint(0, 16, (3, 2 * unit), dtype=torch.uint8)
    words = packing.pack_nibbles(codes, unit)
    assert torch.equal(packing.unpack_nibbles(words, unit), codes)
    each = unit // 32
    for word in range(unit // 8):
        for pair in range(4):
            column = unit + 8 * (each * pair + word % each) + 2 * (word // each)
            bits = words[:, unit // 8 + word] >> 4 * pair
            assert torch.equal(bits & 15, codes[:, column].int())
            assert torch.equal(bits >> 16 & 15, codes[:, column + 1].int())


@pytest.mark.parametrize("name", ["plain", "int4-g32", "int8"])
@pytest.mark.parametrize("splits", [1, 2])
def test_gate_and_residual_in_one_kernel(name, splits):
    packed, exact = matrices(80, torch.float32)[name]
    x = random(2, COLUMNS)
    residual, bias = random(2, 40, seed=4), random(80, seed=5)
    both = functional.linear(x.double().cpu(), exact_values(packed, exact), bias.double().cpu())
    act = reference.gated(both[:, :40], both[:, 40:], Activation.SILU)
    expected = residual.double().cpu() + 0.25 * act
    workspace = Workspace(DEVICE)
    linear(
        x, packed, residual, workspace=workspace, bias_O=bias, residual_TO=residual,
        residual_scale=0.25, activation=Activation.SILU,
        config=LinearConfig(32, 128, splits, 4, 2),
    )  # fmt: skip
    assert_near(residual, expected, torch.float32)


def test_the_clamped_gate():
    x, weight = random(2, 64), random(40, 64, seed=1)
    kind = ClampedSwiGLU(alpha=1.702, limit=3.0)
    found = run(x, pack_matrix(weight), 20, activation=kind)
    both = x.double() @ weight.double().T
    assert_near(found, reference.gated(both[:, :20], both[:, 20:], kind), torch.float32)


@pytest.mark.parametrize("name", NAMES[1:])
def test_expanded_matrices(name):
    packed, exact = matrices(40, torch.float32)[name]
    out = torch.full((40, COLUMNS), float("nan"), device=DEVICE)
    dequantize(packed, out)
    assert_near(out, exact_values(packed, exact), torch.float32)


def test_large_batches_go_through_the_library():
    x, weight, bias = random(90, 256), random(30, 256, seed=1), random(30, seed=2)
    out = torch.empty(90, 30, device=DEVICE)
    matmul(x, pack_matrix(weight), out, bias_O=bias)
    assert_near(out, x.double() @ weight.double().T + bias.double(), torch.float32)
    packed = quantize_matrix(weight, 4, 64)
    matmul(x, packed, out, scratch=torch.empty(30 * 256 + 7, device=DEVICE))
    assert_near(out, x.double().cpu() @ exact_values(packed.to("cpu"), None).T, torch.float32)
    with pytest.raises(ValueError, match="scratch"):
        matmul(x, packed, out)


def test_float8_products_are_scaled_by_rows():
    x, weight, bias = random(32, 64), random(48, 64, seed=1), random(48, seed=2)
    codes = torch.empty(32, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(32, device=DEVICE)
    quantize_rows(x, codes, scales)
    packed = fp8_matrix(weight).to(DEVICE)
    out = torch.empty(32, 48, dtype=torch.bfloat16, device=DEVICE)
    scaled_matmul(codes, scales, packed, out, bias_O=bias.bfloat16())
    exact = (codes.double() * scales.double()[:, None]).cpu() @ exact_values(packed, None).T
    assert_near(out, exact + bias.double().cpu(), torch.bfloat16)
    with pytest.raises(ValueError, match="float8"):
        scaled_matmul(x, scales, packed, out)
    with pytest.raises(ValueError, match="row"):
        scaled_matmul(codes, scales, quantize_matrix(weight, 8), out)


def test_what_the_library_cannot_multiply_in_float8_is_known():
    fits = fp8_matrix(random(48, 64))
    assert multiplies_scaled(fits, torch.bfloat16)
    assert not any(multiplies_scaled(fits, other) for other in (torch.float32, torch.float16))
    for matrix in (
        fp8_matrix(random(47, 64)),
        fp8_matrix(random(48, 72)),
        pack_matrix(random(8, 16)),
        replace(fits, scales=fits.scales.bfloat16()),
    ):
        assert not multiplies_scaled(matrix, torch.bfloat16)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 48])  # of rows that share a scale
def test_float8_of_checkpoints_is_multiplied_with_scales_of_any_type(scale_dtype, blocks):
    pytest.importorskip("ml_dtypes")
    x, own = random(32, 64), fp8_matrix(random(48, 64, seed=1))
    scales = (torch.rand(48 // blocks, 1, device=DEVICE) * 0.02 + 0.01).to(scale_dtype)
    stored = QuantizedTensor(
        format=replace(number_format("fp8"), group_rows=blocks),
        codes=as_array(own.codes),
        scales=as_array(scales),
    )
    packed = pack_matrix(stored).to(DEVICE)
    assert packed.scales.dtype == torch.float32
    assert multiplies_scaled(packed, torch.bfloat16)
    codes = torch.empty(32, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    x_scales = torch.empty(32, device=DEVICE)
    quantize_rows(x, codes, x_scales)
    out = torch.empty(32, 48, dtype=torch.bfloat16, device=DEVICE)
    scaled_matmul(codes, x_scales, packed, out)
    weight = own.codes.double() * scales.double().repeat_interleave(blocks, 0)
    exact = (codes.double() * x_scales.double()[:, None]) @ weight.T
    assert_near(out, exact, torch.bfloat16)
    unconverted = replace(packed, scales=packed.scales.half())
    with pytest.raises(ValueError, match="float32"):
        scaled_matmul(codes, x_scales, unconverted, out)


WITHIN = {  # what a device has: the most that a program may take of it
    "A100": DeviceLimits(capability=(8, 0), shared_bytes=166_912),
    "L40S": DeviceLimits(capability=(8, 9), shared_bytes=101_376),
    "RTX 5090": DeviceLimits(capability=(12, 0), shared_bytes=101_376),
    "H100": DeviceLimits(capability=(9, 0), shared_bytes=232_448),
}


@pytest.mark.parametrize("device", WITHIN)
def test_tiles_fit_into_the_devices_shared_memory(device, monkeypatch):
    limits, hopper = WITHIN[device], WITHIN["H100"]
    weight = random(256, 1024).cpu()
    for matrix in (
        pack_matrix(weight.bfloat16()), quantize_matrix(weight, 8), quantize_matrix(weight, 8, 128),
        quantize_matrix(weight, 4, 32), quantize_matrix(weight, 4, 128), fp8_matrix(weight),
    ):  # fmt: skip
        for tokens in (1, 17, 64, 128):
            for outputs in (256, 128):
                x = torch.empty(tokens, 1024, dtype=torch.bfloat16)
                monkeypatch.setattr(linear_module, "device_limits", lambda _: hopper)
                usual = linear_module.guess(matrix, tokens, outputs, x)
                monkeypatch.setattr(linear_module, "device_limits", lambda _: limits)
                found = linear_module.guess(matrix, tokens, outputs, x)
                tile = found.block_o * matrix.codes[0].nbytes * found.block_k // 1024
                tiles = tile * (256 // outputs) + tokens * found.block_k * 2
                assert (found.num_stages - 1) * tiles <= limits.shared_bytes
                of_registers = outputs == 128 and tokens == 128 and device != "H100"
                block_o = 64 if of_registers else usual.block_o
                assert replace(found, num_stages=1, block_k=1) == replace(
                    usual, num_stages=1, block_k=1, block_o=block_o
                )
                if device == "H100" or (tokens == 1 and outputs == 256 and device == "A100"):
                    assert found == usual
                assert found.num_stages >= 3 or (matrix.group == 128 and tokens == 128)
    plain = pack_matrix(weight.bfloat16())
    x = torch.empty(64, 1024, dtype=torch.bfloat16)
    monkeypatch.setattr(
        linear_module, "device_limits", lambda _: replace(limits, shared_bytes=1000)
    )
    assert linear_module.guess(plain, 64, 256, x).num_stages == 2, "and the compiler says no"


def test_a_kernel_that_does_not_fit_is_told_in_one_sentence():
    class Launched(JITFunction):
        def __init__(self):
            self.__name__ = "linear_kernel"

        def run(self, error):
            raise error

    def told(error):
        try:
            Launched().run(error)
        except Exception as caught:
            return kernel_problem(caught, "a GPU")

    assert told(OutOfResources(196_608, 101_376, "shared memory")) == (
        "The kernel linear_kernel needs 196608 bytes of shared memory, and a GPU has 101376."
    )
    assert told(PTXASError("first\nlast")) == (
        "The kernel linear_kernel cannot be compiled for a GPU: last"
    )
    assert told(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def test_what_does_not_fit_is_refused():
    packed = DeviceMatrix(format=Format.PLAIN, shape=(4, 16), codes=random(4, 16))
    for x, out in ((random(2, 15), random(2, 4)), (random(2, 16), random(2, 3)),
                   (random(2, 16, dtype=torch.float16), random(2, 4))):  # fmt: skip
        with pytest.raises(ValueError, match=r"matrix|is not"):
            linear(x, packed, out, workspace=Workspace(DEVICE))


def test_layouts_that_the_kernels_lack_are_told():
    weight = asymmetric(16, COLUMNS, 4, 128)
    assert pack_matrix(weight) is not None
    act_order = QuantizedTensor(
        format=weight.format, codes=weight.codes, scales=weight.scales, zeros=weight.zeros,
        group_of=np.zeros(COLUMNS, dtype=np.int64),
    )  # fmt: skip
    assert pack_matrix(act_order) is None


@pytest.mark.parametrize(
    "quantize",
    [
        lambda weight: quantize_matrix(weight, 8, 32),
        lambda weight: quantize_matrix(weight, 4),
        fp8_matrix,
    ],
    ids=["int8", "int4", "fp8"],
)
@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 64)], ids=str)
def test_quantizing_takes_little_memory_beside_the_matrix(monkeypatch, quantize, shape):
    weight, sizes = random(*shape), []
    whole = quantize(weight)
    rounded = packing._rounded

    def noting(parts, scales, least):
        sizes.append(parts.numel())
        return rounded(parts, scales, least)

    monkeypatch.setattr(packing, "_SLICE", 130)
    monkeypatch.setattr(packing, "_rounded", noting)
    found = quantize(weight)
    assert max(sizes, default=0) <= 128
    assert found.shape == whole.shape == shape
    assert torch.equal(found.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert torch.equal(found.scales, whole.scales)


def test_a_gated_pair_is_split_as_its_outputs_ask(monkeypatch):
    """Both branches of an output are one program's."""
    grids = []
    monkeypatch.setattr(linear_module, "num_multiprocessors", lambda _: 132)
    monkeypatch.setattr(linear_module, "launch", lambda grid, *_, **__: grids.append(grid))
    x, workspace = random(1, 4096), Workspace(DEVICE)
    for rows, activation in ((4096, None), (8192, Activation.SILU)):
        matrix = pack_matrix(torch.zeros(rows, 4096, device=DEVICE))
        out = torch.zeros(1, 4096, device=DEVICE)
        linear(x, matrix, out, workspace=workspace, activation=activation)
    assert grids[0] == grids[1]
    assert grids[0][2] == 4
