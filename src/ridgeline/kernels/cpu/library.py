"""Finding and loading the library for this machine's instruction set."""

import ctypes
import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.core.errors import MachineError, OutOfMemoryError
from ridgeline.kernels.cpu.structs import FUNCTIONS, RAISING

ABI_VERSION = 20  # RL_ABI_VERSION of the header that this package was written for

# Instruction-set levels in the numbering of csrc/cpu/detect.cpp, the newest last.
LEVELS = ("generic", "avx2", "avxvnni", "avx512", "avx512bf16", "avx512amx", "neondot")
LEVEL_VARIABLE = "RIDGELINE_CPU_LEVEL"  # for debugging: forces a level


class NativeLibraryError(MachineError):
    """The CPU kernels are not built, or do not run here."""


def available_levels() -> tuple[str, ...]:
    """The levels that are built and that this machine runs, the newest last."""
    detect = _function(_open("detect"), "ridgeline_runs_level")
    return tuple(
        level for number, level in enumerate(LEVELS) if detect(number) and _find(level) is not None
    )


def native_kernels_run() -> bool:
    """Whether the kernels are built; one of their levels runs on every machine."""
    return _find("detect") is not None and bool(available_levels())


def chosen_level() -> str:
    """The level that is used here: the fastest, unless the variable forces another.

    Raises:
        NativeLibraryError: the machine does not run the forced one.
    """
    forced = os.environ.get(LEVEL_VARIABLE)
    if forced:
        return _runnable(forced)
    prefers = _function(_open("detect"), "ridgeline_prefers_level")
    return [level for level in available_levels() if prefers(LEVELS.index(level))][-1]


def native_level() -> str | None:
    """The level that is used here; ``None`` where the kernels are not built.

    Raises:
        NativeLibraryError: see `chosen_level`.
    """
    return chosen_level() if native_kernels_run() else None


@cache
def load_library(level: str | None = None) -> ctypes.CDLL:
    """The kernels for ``level``, or for the fastest level that this machine runs.

    Raises:
        NativeLibraryError: they are not built, or the machine does not run that level.
    """
    level = _runnable(level) if level else chosen_level()
    library = _open(level)
    if _function(library, "rl_abi_version")() != ABI_VERSION:
        raise _of_another_version()
    for name, (result, arguments) in FUNCTIONS.items():
        function = _function(library, name)
        function.restype, function.argtypes = result, arguments
        if name in RAISING:
            function.errcheck = _unless_out_of_memory
    return library


def _runnable(level: str) -> str:
    if level not in available_levels():
        raise NativeLibraryError(
            f"The CPU kernels for {level!r} cannot run here; this machine and build have "
            f"{', '.join(available_levels())}."
        )
    return level


def _open(level: str) -> ctypes.CDLL:
    path = _path(level)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # of another architecture, or cut short
        raise NativeLibraryError(
            f"The CPU kernels cannot be loaded; install Ridgeline again. ({error})"
        ) from error


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise _of_another_version() from error


def _of_another_version() -> NativeLibraryError:
    return NativeLibraryError("The CPU kernels are of another version; install Ridgeline again.")


def _unless_out_of_memory(result: int, function: Any, _arguments: Any) -> int:
    if result < 0:
        raise OutOfMemoryError(f"The CPU kernels have no memory left ({function.__name__}).")
    return result


def _find(level: str) -> Path | None:
    # An editable install keeps them apart from the sources, in another entry of the path.
    folders = importlib.import_module("ridgeline.kernels.cpu").__path__
    for folder in folders:
        path = Path(folder) / f"libridgeline_cpu_{level}.so"
        if path.is_file():
            return path
    return None


def _path(level: str) -> Path:
    path = _find(level)
    if path is None:
        raise NativeLibraryError(
            "The CPU kernels are not built. Install Ridgeline with pip, which needs a C++ compiler."
        )
    return path
