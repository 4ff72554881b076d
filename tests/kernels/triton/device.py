"""Where the Triton kernels are tested: on a GPU if there is one, else in the interpreter."""

import os

import pytest
import torch

from ridgeline.kernels.gpu import missing_for_gpu, missing_for_triton

DEVICE = "cpu" if missing_for_gpu() else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

if DEVICE == "cpu":  # before the first import of a kernel
    os.environ.setdefault("TRITON_INTERPRET", "1")
if missing_for_triton():
    pytest.skip(missing_for_triton(), allow_module_level=True)


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_near(found, expected, dtype, factor=1.0):
    """‖found − expected‖ ≤ tolerance · ‖expected‖, and no element far off."""
    found, expected = found.double().cpu(), expected.double().cpu()
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    tolerance = TOLERANCE[dtype] * factor
    assert (found - expected).norm() <= tolerance * expected.norm() + 1e-12
    assert (found - expected).abs().max() <= 8 * tolerance * expected.abs().max() + 1e-12
