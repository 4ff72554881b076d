"""When waiting sequences may join: at once (continuous), or only when a batch has ended."""

from collections.abc import Iterable
from typing import Protocol

from ridgeline.scheduler.sequence import Sequence


class Batching(Protocol):
    """Decides at each step whether waiting sequences may be admitted."""

    def open_batch(self, *, num_waiting: int, arrivals_s: Iterable[float], now_s: float) -> float:
        """Nobody runs, and some wait; returns the seconds until a batch starts, or 0.

        ``arrivals_s`` are those of all that wait; they are looked at only if the answer takes it.
        """

    def admits(self, sequence: Sequence) -> bool: ...

    def admitted(self, sequence: Sequence) -> None:
        """The sequence was given a slot."""


class ContinuousBatching:
    """Sequences join and leave at every step (Yu et al. 2022, Orca)."""

    def open_batch(self, *, num_waiting: int, arrivals_s: Iterable[float], now_s: float) -> float:
        return 0.0

    def admits(self, sequence: Sequence) -> bool:
        return True

    def admitted(self, sequence: Sequence) -> None: ...


class StaticBatching:
    """A batch is formed when all of the last one have ended, and nobody joins it later.

    Members come back after a preemption, and the samples of a member's request belong to it. With
    a window (dynamic batching) a batch starts when it is full, or when the first that came has
    waited for ``window_s``.
    """

    def __init__(self, size: int, window_s: float = 0.0) -> None:
        self._size = size
        self._window_s = window_s
        self._num_open = 0

    def open_batch(self, *, num_waiting: int, arrivals_s: Iterable[float], now_s: float) -> float:
        if self._window_s and num_waiting < self._size:
            left_s = min(arrivals_s) + self._window_s - now_s
            if left_s > 0:
                self._num_open = 0
                return left_s
        self._num_open = min(self._size, num_waiting)
        return 0.0

    def admits(self, sequence: Sequence) -> bool:
        return self._num_open > 0 or _is_member(sequence)

    def admitted(self, sequence: Sequence) -> None:
        if not _is_member(sequence):
            self._num_open -= sequence.request.params.n


def _is_member(sequence: Sequence) -> bool:
    """Whether it, or the sample that computed its prompt, was admitted before."""
    return sequence.sample_index > 0 or sequence.was_admitted


def create_batching(name: str, *, size: int, window_s: float) -> Batching:
    """The mode called ``name``, one of `ridgeline.core.settings.scheduling.Batching`.

    Batches are of ``size`` sequences.
    """
    match name:
        case "continuous":
            return ContinuousBatching()
        case "dynamic":
            return StaticBatching(size, window_s)
        case "static":
            return StaticBatching(size)
    raise ValueError(f"there is no batching mode {name!r}")
