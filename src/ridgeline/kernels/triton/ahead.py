"""Kernels compiled before they are needed, several at a time."""

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ridgeline.kernels.triton.launch import is_interpreted


def compile_ahead(asks: Callable[[], None], num_threads: int) -> int:
    """Have the kernels compiled that ``asks`` launches, of which none runs: what they would have
    written is undefined. Returns how many were not known.

    Compilers work outside of Python's lock for most of their time. What cannot be compiled is left
    to the launch that needs it, which says why.
    """
    kind = InterpretedFunction if is_interpreted() else JITFunction
    run = kind.run

    seen: set[Hashable] = set()

    def without_launch(self: Any, *args: Any, **options: Any) -> None:
        asked = _asked(self, args, options)
        if asked not in seen:  # Triton looks it up for long while it is being compiled
            seen.add(asked)
            run(self, *args, **options | {"warmup": True})

    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as threads:
        kind.run = without_launch
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True) as mode:
                asks()
        finally:
            kind.run = run
    return len(mode.raw_futures)


def _asked(kernel: object, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """What a launch is compiled for, or more than that."""
    known: list[Hashable] = [id(kernel)]
    for value in args:
        if isinstance(value, torch.Tensor):
            known.append((value.dtype, value.data_ptr() % 16))
        elif isinstance(value, int):
            known.append((value == 1, value % 16 == 0, value.bit_length() > 31))
        else:
            known.append(type(value).__name__)
    return (*known, *(item for item in options.items() if item[0] != "grid"))


def first_of_classes(numbers: Iterable[int], class_of: Callable[[int], Hashable]) -> list[int]:
    """The first number of each class."""
    found: dict[Hashable, int] = {}
    for number in numbers:
        found.setdefault(class_of(number), number)
    return list(found.values())
