"""When Python looks for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """What is made meanwhile stays, as what imports make does: no collection looks at it, and then
    it is of the oldest generation."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.enable()
