"""That the kernels compile for a GPU, where there is none: the interpreter takes more than the
compiler does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.triton.device import DEVICE  # noqa: F401  (skips the file without triton)

SHARED_BYTES = 227 << 10  # that a block may have
STACK_BYTES = 96  # a few registers, at 128 tokens and with 8-bit KV
SHORT_STACK_BYTES = 512  # the same on tensor cores that take both operands from registers
KERNELS = {
    "attention_kernel", "linear_kernel", "count_digits_kernel", "draw_kernel", "redraw_kernel",
    "_count", "_adjust", "_normalise", "_quantize", "_activate", "_rope",
    "_dequantize", "_route", "_count_pairs", "_place_pairs", "_combine", "_begin", "_end",
}  # fmt: skip


def compiled(folder, *arguments):
    """What `compile_kernels` prints."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    output = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_batches_of_any_size_share_a_kernel(tmp_path):
    found = compiled(tmp_path, "batches")
    products, decodes, prompts = found[:4], found[4:7], found[7:]
    for some in (products, decodes, prompts):
        assert len({entry["hash"] for entry in some}) == 1, some


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path):
    found = compiled(tmp_path)
    assert {entry["kernel"] for entry in found} == KERNELS
    for entry in found:
        assert not entry["trap"], entry
        assert entry["stack_bytes"] <= STACK_BYTES, entry
        assert entry["shared_bytes"] <= SHARED_BYTES, entry
        multiplies = entry["kernel"] in ("attention_kernel", "linear_kernel")
        is_precise = "torch.float32" in entry["case"]  # which tensor cores are not
        assert bool(entry["tensor_core"]) == (multiplies and not is_precise), entry
        assert not multiplies or entry["asynchronous_loads"], entry


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shared_bytes"), [(80, 166912), (89, 101376), (120, 101376)])
def test_the_largest_products_fit_where_shared_memory_is_short(arch, shared_bytes, tmp_path):
    found = compiled(
        tmp_path, "largest-products", "--arch", str(arch), "--shared-bytes", str(shared_bytes)
    )
    assert {entry["kernel"] for entry in found} >= {"linear_kernel"}
    for entry in found:
        assert not entry["trap"], entry
        assert entry["shared_bytes"] <= shared_bytes, entry
        assert entry["stack_bytes"] <= SHORT_STACK_BYTES, entry
