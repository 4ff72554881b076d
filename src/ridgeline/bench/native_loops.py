"""The native loops of ``csrc/cpu/ceilings.h``, through ctypes; calls release the GIL."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from ridgeline.core.errors import MachineError
from ridgeline.kernels.cpu.library import NativeLibraryError, load_library


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticLoop:
    """A loop by its index, what it does, and the number format whose products it bounds."""

    index: int
    name: str
    number_format: str


class NativeLoops:
    """What one shared library, compiled for one instruction set, can measure."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        name = ctypes.c_char_p
        index = ctypes.c_int32
        self._function("read_pattern", name, index)
        self._function("arithmetic_loop", name, index)
        self._function("arithmetic_format", name, index)
        double = ctypes.c_double
        self._function("read_rate", double, index, ctypes.c_size_t, index, double)
        self._function("arithmetic_rate", double, index, index, double)
        self.read_patterns = tuple(_names(library.ridgeline_read_pattern))
        self.arithmetic = tuple(
            ArithmeticLoop(
                index=i,
                name=name,
                number_format=library.ridgeline_arithmetic_format(i).decode(),
            )
            for i, name in enumerate(_names(library.ridgeline_arithmetic_loop))
        )

    def read_bytes_per_s(
        self, pattern: int, *, bytes_per_thread: int, threads: int, seconds: float
    ) -> float:
        """What the threads read together, each in memory of its own, in about ``seconds``.

        Raises:
            MachineError: there is no memory for it.
        """
        rate: float = self._library.ridgeline_read_rate(pattern, bytes_per_thread, threads, seconds)
        if rate <= 0.0:
            raise MachineError(
                f"Reading {bytes_per_thread:,} bytes in each of {threads} threads could not be "
                "measured: there is too little memory."
            )
        return rate

    def operations_per_s(self, loop: ArithmeticLoop, *, threads: int, seconds: float) -> float:
        """Operations of all threads, a multiply-add counted as two."""
        rate: float = self._library.ridgeline_arithmetic_rate(loop.index, threads, seconds)
        assert rate > 0.0, loop
        return rate

    def _function(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, f"ridgeline_{name}")
        function.restype, function.argtypes = result, arguments


def _names(entry: Callable[[int], bytes | None]) -> Iterator[str]:
    for index in count():
        name = entry(index)
        if name is None:
            return
        yield name.decode()


def load_native_loops(level: str | None = None) -> NativeLoops:
    """The loops of one instruction-set level, by default of the one that the kernels use here.

    Raises:
        NativeLibraryError: it is not built, or is older than these loops.
    """
    try:
        return NativeLoops(load_library(level))
    except AttributeError as error:
        raise NativeLibraryError(
            "The CPU kernels are of another version; install Ridgeline again."
        ) from error
