"""What is said where GPU kernels cannot run."""

import importlib
import sys

import pytest
import torch

from ridgeline.core.errors import MissingDependencyError
from ridgeline.kernels import gpu


def test_without_triton_the_kernels_say_what_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ridgeline.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(gpu, "find_spec", lambda _name: None)
    with pytest.raises(MissingDependencyError, match="the package triton") as caught:
        importlib.import_module("ridgeline.kernels.triton")
    assert str(caught.value) == gpu.missing_for_triton() == gpu.missing_for_gpu()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_one_sentence_says_why():
    reason = gpu.missing_for_gpu()
    assert reason is not None
    assert reason.endswith(".")
    assert "\n" not in reason
