"""What is said where GPU kernels cannot run."""

import importlib
import sys
from importlib.util import find_spec

import pytest
import torch

from ridgeline.core.errors import MachineError, MissingDependencyError
from ridgeline.kernels import gpu


@pytest.mark.parametrize("package", ["torch", "numpy", "triton"])
def test_without_a_package_the_kernels_say_what_is_missing(package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ridgeline.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(MissingDependencyError, match=f"the package {package}") as caught:
        importlib.import_module("ridgeline.kernels.triton")
    assert str(caught.value) == gpu.missing_for_triton() == gpu.missing_for_gpu()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_one_sentence_says_why():
    reason = gpu.missing_for_gpu()
    assert reason is not None
    assert reason.endswith(".")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("capability", "version", "compiles"),
    [
        ((10, 0), "3.6.0", False),
        ((10, 3), "3.8.1", False),
        ((11, 0), "3.6.0", False),
        ((10, 0), "3.9.0", True),
        ((10, 0), "4.0.0", True),
        ((12, 0), "3.6.0", True),
        ((9, 0), "3.6.0", True),
    ],
)
def test_four_bits_are_refused_where_triton_puts_a_trap_in_their_place(
    capability, version, compiles, monkeypatch
):
    import triton

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(triton, "__version__", version)
    reason = gpu.missing_for_int4()
    assert (reason is None) == compiles
    assert compiles or "need triton 3.9" in reason
    if not compiles:
        from ridgeline.executors.cuda.opening import check_int4

        with pytest.raises(MachineError, match=f"{version} is installed"):
            check_int4()


def test_without_a_gpu_four_bits_are_not_refused():
    assert torch.cuda.is_available() or gpu.missing_for_int4() is None
