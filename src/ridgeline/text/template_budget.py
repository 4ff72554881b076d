"""What a chat template may spend: a meter that every operation of the sandbox pays into."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2.utils import Namespace

ELEMENT_COST = 32
STATEMENT_COST = 128
_CALLS_BETWEEN_CLOCKS = 8
_VIEWS: tuple[type[Any], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class BudgetExceeded(Exception):  # noqa: N818 - it is not an error until the renderer says so
    """The template wants more time or memory than it may have."""


class Budget:
    """Units (about one character each) and seconds of this thread's CPU time that are left.

    Units bound memory and, being counted, stop a bomb at the same place on any machine; the clock
    is CPU time, so that a busy machine refuses nothing that an idle one would render.
    """

    def __init__(self, units: int, seconds: float) -> None:
        self._left = units
        self._deadline = time.thread_time() + seconds
        self._until_clock = _CALLS_BETWEEN_CLOCKS

    def charge(self, units: int) -> None:
        """Pay before the work is done; BudgetExceeded, now and ever after, if it cannot be paid."""
        self._left -= units
        self._until_clock -= 1
        if self._until_clock <= 0 or units > 1 << 16:
            self._until_clock = _CALLS_BETWEEN_CLOCKS
            if time.thread_time() > self._deadline:
                self._left = -1
        if self._left < 0:
            self._left = -1
            raise BudgetExceeded


_active = threading.local()


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Make ``budget`` the one that this thread's templates pay into."""
    before = getattr(_active, "budget", None)
    _active.budget = budget
    try:
        yield
    finally:
        _active.budget = before


def charge(units: int) -> None:
    """Pay into this thread's budget."""
    _active.budget.charge(units)


def weigh(value: Any) -> int:
    """Charge for reading all of a value, as ``str``, ``==`` and ``hash`` do; return the units.

    A nest of lists that share their parts counts in full, since those operations unfold it.
    """
    if isinstance(value, str):
        units = len(value)
    elif isinstance(value, int):
        units = value.bit_length() // 3
    elif isinstance(value, dict):
        charge(ELEMENT_COST)
        return ELEMENT_COST + sum(weigh(key) + weigh(item) for key, item in value.items())
    elif isinstance(value, _VIEWS):
        charge(ELEMENT_COST)
        return ELEMENT_COST + sum(weigh(item) for item in value)
    elif isinstance(value, range):
        units = len(value)
    elif isinstance(value, Namespace):
        return weigh(object.__getattribute__(value, "_Namespace__attrs"))
    else:
        units = 0
    units += ELEMENT_COST
    charge(units)
    return units


def weigh_flat(value: Any) -> int:
    """Charge for copying a string, or the references of a container; return the units."""
    try:
        units = len(value) if isinstance(value, str) else ELEMENT_COST * len(value)
    except TypeError:
        units = ELEMENT_COST
    charge(units)
    return units
