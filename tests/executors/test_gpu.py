"""The CUDA executor on a GPU: `make test-gpu`. The same checks run on the CPU in its place."""

import pytest
import torch

from ridgeline.bench.gpu.checks import _CASES, check_all
from ridgeline.executors.cuda import gpu_kernels, open_gpu
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.torch_kernels import TorchKernels


def test_the_checks_pass_on_the_host():
    found = list(check_all(HostDevice(), TorchKernels))
    assert len(found) == len(_CASES)
    assert [check.text() for check in found if not check.passed] == []


def test_a_wrong_kernel_is_noticed():
    class Wrong(TorchKernels):
        def attend(self, q_THd, kv, at, spec):
            return super().attend(q_THd, kv, at, spec) * 1.1

    names = [case.name for case in _CASES if case.dtype == torch.float32][:3]
    found = list(check_all(HostDevice(), Wrong, names=names))
    assert [check.passed for check in found] == [False] * 3
    assert all("FAILED" in check.text() for check in found)


@pytest.mark.gpu
def test_the_checks_pass_on_the_gpu():
    device, _ = open_gpu()
    found = list(check_all(device, lambda: gpu_kernels(device)))
    assert [check.text() for check in found if not check.passed] == []
