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
KERNELS = {
    "attention_kernel", "linear_kernel", "truncation_kernel", "_draw", "_add_and_bar", "_penalise",
    "_count", "_normalise", "_quantize", "_activate", "_rope", "_dequantize", "_route",
    "_count_pairs", "_place_pairs", "_combine",
}  # fmt: skip


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path):
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    output = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    found = [json.loads(line) for line in output.splitlines()]
    assert {entry["kernel"] for entry in found} == KERNELS
    for entry in found:
        assert entry["shared_bytes"] <= SHARED_BYTES, entry
        multiplies = entry["kernel"] in ("attention_kernel", "linear_kernel")
        assert bool(entry["tensor_core"]) == multiplies, entry
        assert not multiplies or entry["asynchronous_loads"], entry
