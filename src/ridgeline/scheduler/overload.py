"""How long those who are turned away should stay away."""

_SMOOTHING = 0.05
_LEAST_S, _MOST_S = 1.0, 60.0


class DrainRate:
    """Tracks how fast the queue empties, as a running mean of the seconds between admissions.

    Only those count between which somebody always waited.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._interval_s: float | None = None

    def note_start(self) -> None:
        """Somebody waits again, after nobody did."""
        self._last_s = None

    def note_admission(self, now_s: float) -> None:
        if self._last_s is not None:
            interval = now_s - self._last_s
            mean = self._interval_s
            self._interval_s = interval if mean is None else mean + _SMOOTHING * (interval - mean)
        self._last_s = now_s

    def wait_s(self, num_waiting: int) -> float:
        """Expected seconds until as many as wait now have been admitted, 1 to 60."""
        return min(_MOST_S, max(_LEAST_S, num_waiting * (self._interval_s or 0.0)))
