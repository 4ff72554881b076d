"""Whether this machine can run the GPU kernels; imports neither torch nor triton until asked."""

import ctypes
from importlib.util import find_spec

_INT4_ON_BLACKWELL = (3, 9)  # the first Triton that compiles its products of 64 tokens and more


def missing_for_triton() -> str | None:
    """One sentence on why the Triton kernels cannot be imported; ``None`` if they can."""
    for package in ("torch", "numpy", "triton"):
        if find_spec(package) is None:
            where = " (Linux only)" if package == "triton" else ""
            return f"The GPU kernels need the package {package}{where}, which is not installed."
    return None


def has_driver() -> bool:
    """Whether the driver of NVIDIA's GPUs is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_fp8() -> bool:
    """Whether the GPU multiplies float8: from compute capability 8.9 on."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def missing_for_int4() -> str | None:
    """One sentence on why weights of four bits cannot be multiplied on the GPU; ``None`` if they
    can. Triton 3.6 to 3.8 put a trap in the place of such products of compute capability 10."""
    import torch
    import triton

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if major not in (10, 11) or version >= _INT4_ON_BLACKWELL:
        return None
    return (
        f"int4 weights on {torch.cuda.get_device_name()} (compute capability {major}.{minor}) need "
        f"triton {'.'.join(map(str, _INT4_ON_BLACKWELL))}, and {triton.__version__} is installed; "
        "upgrade it, or use int8 or fp8."
    )


def missing_for_gpu() -> str | None:
    """One sentence on why nothing can run on a GPU here; ``None`` if it can."""
    reason = missing_for_triton()
    if reason is not None:
        return reason
    if not has_driver():  # seen without torch, whose import takes a second
        return "There is no NVIDIA driver (libcuda.so.1) on this machine."
    import torch

    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA; "
            "install its CUDA build to use a GPU."
        )
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device on this machine."
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return (
            f"The GPU kernels need compute capability 8.0 or later; "
            f"{torch.cuda.get_device_name()} has {major}.{minor}."
        )
    return None
