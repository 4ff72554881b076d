"""What a part of the benchmark is at, and what it tells of it."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.gpu.settings import Settings
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.tuning import Tuning

NO_TIME = "no time left"


class Message(NamedTuple):
    """``kind`` is began, left out, failed, finished (a part), lost (the device), or one of results.

    ``what`` is the case or part; ``value`` the result, or why.
    """

    kind: str
    what: str
    value: Any = None


class Progress:
    """Says which cases may begin: those that were not begun before, as long as there is time.

    ``ends_at`` is that of `time.time`, which processes share.
    """

    def __init__(
        self, tell: Callable[[Message], None], *, done: Collection[str], ends_at: float
    ) -> None:
        self._tell, self._ends_at = tell, ends_at
        self._done = set(done)
        self.case: str | None = None  # which was begun last

    @property
    def is_over(self) -> bool:
        """Whether no case begins any more."""
        return time.time() >= self._ends_at

    def allows(self, what: str, needed_s: float = 0.0) -> bool:
        """Whether a case that takes ``needed_s`` begins now."""
        if what in self._done:
            return False
        if time.time() + needed_s >= self._ends_at:
            self.leave_out(what, NO_TIME)
            return False
        self._done.add(what)
        self.case = what
        self._tell(Message("began", what))
        return True

    def leave_out(self, what: str, why: str) -> None:
        """Tell once that a case is not measured."""
        if what not in self._done:
            self._done.add(what)
            self._tell(Message("left out", what, why))

    def give_up(self, why: str) -> None:
        """Tell that the case that was begun cannot be measured, for reasons that are not ours."""
        self._tell(Message("left out", self.case or "", why))

    def result(self, kind: str, value: Any) -> None:
        """Tell what came of the case."""
        self._tell(Message(kind, self.case or "", value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What parts measure with; ``kernels`` makes those to be measured, and ``attention`` is what
    attention may be by beside them, if that was looked for; ``tuning`` finds tiles of products."""

    device: Device
    kernels: Callable[[], Kernels]
    settings: Settings
    progress: Progress
    attention: AttentionBackends | None = None
    tuning: Tuning | None = None
