"""The GPU of this machine, and the kernels for it."""

from ridgeline.executors.cuda.cuda_device import CUDADevice
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.triton_kernels import TritonKernels


def open_gpu() -> tuple[Device, Kernels]:
    """The first CUDA device, and Triton's kernels on it."""
    device = CUDADevice()
    with device.scope():
        return device, TritonKernels(device.torch_device)
