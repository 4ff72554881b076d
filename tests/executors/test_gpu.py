"""The checks of `make test-gpu`, on the CPU in the place of a GPU, and what they notice."""

import pytest
import torch
from benchmarks.gpu.checks import _CASES, check_all

from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.opening import gpu_kernels, open_gpu
from ridgeline.executors.cuda.torch_kernels import TorchKernels, unpacked
from ridgeline.kernels.triton import SMALL_BATCH, fp8_matrix


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


def test_float8_products_are_within_what_the_check_allows():
    """A GPU rounds the activations of a prompt to float8 too; the check's reference does not."""

    class Rounds(TorchKernels):
        def linear(self, x_TI, matrix, **options):
            if len(x_TI) > SMALL_BATCH:
                x_TI = unpacked(fp8_matrix(x_TI), x_TI.dtype)
            return super().linear(x_TI, matrix, **options)

    (check,) = check_all(HostDevice(), Rounds, names=[c.name for c in _CASES if c.form == "fp8"])
    assert check.passed
    assert check.error > 0.1


class Jittered(TorchKernels):
    """Moves every output by the last bit of bfloat16, up or down, as other sums do."""

    def __init__(self, seed):
        self.seed = seed

    def moved(self, out):
        if out.dtype != torch.bfloat16:
            return out
        generator = torch.Generator().manual_seed(self.seed + 1000 * out[0].numel() + len(out))
        step = torch.randint(-1, 2, out.shape, generator=generator, dtype=torch.int16)
        moved = (out.contiguous().view(torch.int16) + step).view(torch.bfloat16)
        return torch.where(out == 0, out, moved)

    def linear(self, *arguments, **options):
        return self.moved(super().linear(*arguments, **options))

    def attend(self, *arguments):
        return self.moved(super().attend(*arguments))


@pytest.mark.parametrize("seed", range(4))
def test_the_last_bit_of_bfloat16_fails_no_check(seed):
    names = [case.name for case in _CASES if case.dtype == torch.bfloat16 and case.form is None]
    found = check_all(HostDevice(), lambda: Jittered(seed), names=names, execution="eager")
    assert [check.text() for check in found if not check.passed] == []


@pytest.mark.gpu
def test_the_checks_pass_on_the_gpu():
    device, _ = open_gpu()
    found = list(check_all(device, lambda: gpu_kernels(device)))
    assert [check.text() for check in found if not check.passed] == []
