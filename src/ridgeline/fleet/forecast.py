"""How many requests will come, and how long they are: level, trend, and how far bursts go."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt

INTERVAL_S = 5.0
_SLOW, _FAST = 0.1, 0.6  # weight of the newest interval in the level, and where it is a surprise
_SURPRISE = 3.0  # standard deviations of a Poisson count
_TREND, _DAMPING = 0.1, 0.95  # Gardner and McKenzie 1985: a trend is not for ever
_REMEMBERED_S = 1800.0  # of what came of forecasts
_FEWEST = 10  # of these mean something
_LENGTHS = 256  # requests whose lengths are those of the next ones
_BURST_SHARE = 0.95
_P90_NORMAL = 1.2816


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    """What will come in the next seconds: requests per second, as likely more as fewer (``p50``);
    so many that of twenty requests nineteen come when there are no more (``burst``); and lengths of
    recent ones: tokens of the prompt that are not cached, and of the output."""

    p50_rps: float
    burst_rps: float
    lengths: Sequence[tuple[int, int]]


class ArrivalForecast:
    """Counts arrivals in intervals of `INTERVAL_S`, from ``begin_s`` on.

    The level is smoothed exponentially, fast where a count cannot be chance; its trend is damped
    (Holt 1957; Gardner and McKenzie 1985). How far bursts go is what came of earlier forecasts: a
    quantile, over requests, of the ratio of arrivals to those expected.
    """

    def __init__(self, begin_s: float, *, ahead_s: float) -> None:
        self._ahead = max(1, round(ahead_s / INTERVAL_S))
        self._begin_s = begin_s
        self._count = 0
        self._level: float | None = None  # arrivals in an interval
        self._trend = 0.0
        self._counts: deque[int] = deque(maxlen=self._ahead)
        self._expected: deque[float] = deque(maxlen=self._ahead + 1)
        self._came: deque[tuple[float, int]] = deque(maxlen=round(_REMEMBERED_S / INTERVAL_S))
        self._prompts: deque[int] = deque(maxlen=_LENGTHS)
        self._outputs: deque[int] = deque(maxlen=_LENGTHS)

    def look_ahead(self, seconds: float) -> None:
        """From now on so far; what came of forecasts of other seconds stays known."""
        ahead = max(1, round(seconds / INTERVAL_S))
        if ahead != self._ahead:
            self._ahead = ahead
            self._counts = deque(self._counts, maxlen=ahead)
            self._expected = deque(maxlen=ahead + 1)

    def note(self, now_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """A request comes; ``output_tokens`` of it are expected."""
        self._close_intervals(now_s)
        self._count += 1
        self._prompts.append(prompt_tokens)
        if not self._outputs:
            self._outputs.append(output_tokens)

    def take_back(self, noted_s: float, prompt_tokens: int) -> None:
        """A request that was noted then turns out to be no work, unless its interval is over."""
        if noted_s >= self._begin_s:
            self._count -= 1
            with suppress(ValueError):
                self._prompts.remove(prompt_tokens)

    def note_output(self, output_tokens: int) -> None:
        """So long was one."""
        self._outputs.append(output_tokens)

    def expected(self, now_s: float) -> ExpectedLoad:
        """What will come after ``now_s``."""
        self._close_intervals(now_s)
        if self._level is None:  # the first interval
            rate = self._count / max(INTERVAL_S, now_s - self._begin_s)
            return ExpectedLoad(p50_rps=rate, burst_rps=rate, lengths=self._lengths)
        count = self._sum_ahead()
        by_chance = 1 + _P90_NORMAL / sqrt(max(1.0, count))
        rate = count / (self._ahead * INTERVAL_S)
        return ExpectedLoad(
            p50_rps=rate, burst_rps=rate * max(by_chance, self._burst()), lengths=self._lengths
        )

    def _burst(self) -> float:
        """Of the requests that came of late, a twentieth came when there were more than this many
        times those expected: bursts are short, and many requests are in them."""
        if len(self._came) < _FEWEST:
            return 1.0
        in_order = sorted(self._came)
        sums = list(accumulate(count for _, count in in_order))
        return in_order[bisect_left(sums, _BURST_SHARE * sums[-1])][0]

    @property
    def _lengths(self) -> list[tuple[int, int]]:
        """Both are of recent requests, though not of the same ones: outputs are known later."""
        outputs = self._outputs
        return [(prompt, outputs[n % len(outputs)]) for n, prompt in enumerate(self._prompts)]

    def _close_intervals(self, now_s: float) -> None:
        while now_s >= self._begin_s + INTERVAL_S:
            self._begin_s += INTERVAL_S
            self._learn(self._count)
            self._count = 0

    def _learn(self, count: int) -> None:
        self._counts.append(count)
        if len(self._expected) > self._ahead and self._expected[0] >= 1:
            count_ahead = sum(self._counts)
            self._came.append((count_ahead / self._expected[0], count_ahead))
        if self._level is None:
            self._level = float(count)
        else:
            before = self._level + _DAMPING * self._trend
            is_surprise = abs(count - before) > _SURPRISE * sqrt(before + 1)
            level = before + (_FAST if is_surprise else _SLOW) * (count - before)
            if is_surprise:  # a burst is no trend
                self._trend = 0.0
            else:
                self._trend = _DAMPING * self._trend + _TREND * (level - before)
            self._level = max(0.0, level)
        self._expected.append(self._sum_ahead())

    def _sum_ahead(self) -> float:
        """Arrivals that are expected in the intervals ahead."""
        assert self._level is not None
        total, level, trend = 0.0, self._level, self._trend
        for _ in range(self._ahead):
            trend *= _DAMPING
            level = max(0.0, level + trend)
            total += level
        return total
