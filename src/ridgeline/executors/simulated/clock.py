"""Time that passes when someone says so."""


class VirtualClock:
    """Calling it gives seconds since its start, like ``time.monotonic``."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Go to a time; nothing happens if it has passed."""
        self._now_s = max(self._now_s, time_s)
