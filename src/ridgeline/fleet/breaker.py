"""When an engine is left alone, and how often others are asked in its place."""

import time
from collections.abc import Callable

_FAILURES = 3
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_RETRY_SHARE = 0.1
_MOST_RETRIES = 100.0


class CircuitBreaker:
    """Opens after three failures in a row; closes once a probe and then a request went well.

    Failures are connections that cannot be made or break, silence, and 5xx; what a caller did wrong
    is none. While it is open, nothing is sent but probes, each after twice the wait of the one
    before. After one that is answered a single request is tried.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._wait_s = _FIRST_WAIT_S
        self._opened_s: float | None = None
        self._is_half_open = False
        self._is_trying = False

    @property
    def state(self) -> str:
        """As metrics name it: closed, open, or half-open."""
        if self._opened_s is None:
            return "closed"
        return "half-open" if self._is_half_open else "open"

    @property
    def allows(self) -> bool:
        """Whether a request may be sent."""
        return self._opened_s is None or (self._is_half_open and not self._is_trying)

    @property
    def wants_probe(self) -> bool:
        """Whether it is time to ask how the engine is."""
        return self._opened_s is None or self._clock() >= self._opened_s + self._wait_s

    def begin(self) -> None:
        """A request is sent."""
        self._is_trying = self._is_half_open

    def probed(self) -> None:
        """A probe was answered."""
        self._is_half_open = self._opened_s is not None

    def succeed(self) -> None:
        """A request was answered."""
        self._num_failures, self._wait_s = 0, _FIRST_WAIT_S
        self._opened_s, self._is_half_open, self._is_trying = None, False, False

    def release(self) -> None:
        """A request ended without saying anything about the engine."""
        self._is_trying = False

    def fail(self) -> None:
        """A request or a probe failed."""
        self._num_failures += 1
        if self._opened_s is not None:
            if self._is_half_open or self.wants_probe:
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
                self._opened_s = self._clock()
        elif self._num_failures >= _FAILURES:
            self._opened_s = self._clock()
        self._is_half_open = self._is_trying = False


class RetryBudget:
    """Retries may be a tenth of all requests, so that an overload is not made worse by them."""

    def __init__(self) -> None:
        self._left = _MOST_RETRIES * _RETRY_SHARE

    def request(self) -> None:
        """A request came."""
        self._left = min(self._left + _RETRY_SHARE, _MOST_RETRIES)

    def take(self) -> bool:
        """Whether one more retry may be."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
