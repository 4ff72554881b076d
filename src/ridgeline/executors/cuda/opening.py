"""The GPU of this machine, and the kernels for it."""

from pathlib import Path

import torch

from ridgeline.core.errors import MachineError, SettingsError
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.cuda_device import CUDADevice
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.triton_kernels import TritonKernels
from ridgeline.executors.cuda.tuning import Tuning
from ridgeline.executors.cuda.tuning_cache import TuningCache
from ridgeline.kernels.flash_attention import installed_flash_attention
from ridgeline.kernels.gpu import has_fp8, missing_for_int4
from ridgeline.roofline.storage import cache_folder


def check_fp8() -> None:
    """Refuse float8 on a GPU that has none.

    Raises:
        SettingsError: it is older than compute capability 8.9.
    """
    if not has_fp8():
        major, minor = torch.cuda.get_device_capability()
        raise SettingsError(
            f"fp8 needs a GPU of compute capability 8.9, and {torch.cuda.get_device_name()} has "
            f"{major}.{minor}; use int8."
        )


def check_int4() -> None:
    """Refuse weights of four bits where they cannot be compiled.

    Raises:
        MachineError: the installed Triton is too old for the GPU.
    """
    reason = missing_for_int4()
    if reason is not None:
        raise MachineError(reason)


def open_gpu() -> tuple[Device, Kernels]:
    """The first CUDA device, and Triton's kernels on it."""
    device = CUDADevice()
    return device, gpu_kernels(device)


def gpu_attention(wanted: str = "auto") -> AttentionBackends:
    """What may attend beside the kernels; ``wanted`` as in `AttentionBackends`."""
    if wanted == "triton":
        return AttentionBackends(wanted=wanted)
    package = installed_flash_attention(torch.cuda.get_device_capability())
    return AttentionBackends(wanted=wanted, package=package)


def gpu_tuning(path: str = "auto") -> Tuning | None:
    """How tiles of products are timed, and kept in the folder ``path``, the user's cache (auto), or
    not at all (off)."""
    if path == "off":
        return None
    folder = cache_folder() / "tuned" if path == "auto" else Path(path)
    return Tuning(cache=TuningCache(folder=folder))


def gpu_kernels(device: Device) -> Kernels:
    """Triton's kernels, whose scratch memory is made ready by the stream that will use it."""
    with device.scope():
        return TritonKernels(device.torch_device)
