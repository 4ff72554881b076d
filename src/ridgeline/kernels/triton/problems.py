"""What Triton raises where a kernel cannot be had, told apart from what a device raises."""

import traceback

from triton.errors import TritonError
from triton.runtime.errors import InterpreterError, OutOfResources
from triton.runtime.jit import JITFunction

_PASSES_FAILED = "PassManager::run failed"  # a RuntimeError of the compiler's own


def cannot_be_compiled(error: BaseException) -> bool:
    """Whether an error is the compiler's: another configuration may do, and the device is well."""
    if isinstance(error, TritonError):
        return not isinstance(error, InterpreterError)
    return isinstance(error, RuntimeError) and _PASSES_FAILED in str(error)


def kernel_problem(error: BaseException, device: str) -> str | None:
    """One sentence on why a device cannot have a kernel; ``None`` for errors of other kinds."""
    if not cannot_be_compiled(error):
        return None
    name = _kernel(error) or "of this step"
    if isinstance(error, OutOfResources):
        unit = " bytes of" if "memory" in error.name else ""
        return (
            f"The kernel {name} needs {error.required}{unit} {error.name}, and {device} has "
            f"{error.limit}."
        )
    last = str(error).strip().splitlines() or [type(error).__name__]
    return f"The kernel {name} cannot be compiled for {device}: {last[-1].strip()}"


def _kernel(error: BaseException) -> str | None:
    """The kernel that was launched as an error was raised."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        launched = frame.f_locals.get("self")
        if isinstance(launched, JITFunction):
            return str(launched.__name__)
    return None
