"""Kernels compiled before they are needed, several at a time."""

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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

    def without_launch(self: Any, *args: Any, **options: Any) -> Any:
        return run(self, *args, **options | {"warmup": True})

    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as threads:
        kind.run = without_launch
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True) as mode:
                asks()
        finally:
            kind.run = run
    return len(mode.raw_futures)


def first_of_classes(numbers: Iterable[int], class_of: Callable[[int], Hashable]) -> list[int]:
    """The first number of each class."""
    found: dict[Hashable, int] = {}
    for number in numbers:
        found.setdefault(class_of(number), number)
    return list(found.values())
