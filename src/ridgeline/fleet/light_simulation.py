"""What replicas will make of a load, from how they are now: steps by predicted seconds.

Neither tokens nor blocks: a replica is its queue of prompts and how long its outputs still run, and
decode steps between two events are one. That is some 10 µs a request, where the engine's scheduler
takes a millisecond.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, cycle
from math import ceil, inf, log

from ridgeline.fleet.policies import EngineLoad
from ridgeline.roofline.slo import Slo
from ridgeline.scheduler.prediction import StepCurve

_STEP_TOKENS = 2048  # that a step takes of prompts at the most: engines do not say their own
_MOST_ARRIVALS = 2000  # of those that count
_NUM_GAPS = 500
# Of a Poisson process with one arrival a second: the same for all that are compared.
_GAPS = [-log(1 - (n + 0.5) / _NUM_GAPS) for n in range(_NUM_GAPS)]
random.Random(0).shuffle(_GAPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica as it is now, and in how many seconds it takes requests (0: it does)."""

    load: EngineLoad
    curve: StepCurve
    kv_tokens: int
    starts_in_s: float = 0.0

    def as_new(self, start_s: float) -> "ReplicaLoad":
        """One like it that takes requests in so many seconds."""
        load = self.load
        empty = EngineLoad(linear=load.linear, pass_s=load.pass_s, max_seqs=load.max_seqs)
        return replace(self, load=empty, starts_in_s=start_s)


def attainment(
    replicas: Sequence[ReplicaLoad],
    rate_rps: float,
    lengths: Sequence[tuple[int, int]],
    slo: Slo,
    *,
    from_s: float,
    until_s: float,
) -> float:
    """The share of requests within the limits, of those that come from ``from_s`` to ``until_s``
    from now; 1 if none does.

    ``lengths``: tokens of prompts (without what is cached) and of outputs, which come in turn.
    """
    if not lengths or rate_rps <= 0:
        return 1.0
    output = ceil(sum(each for _, each in lengths) / len(lengths))
    simulated = [_Replica(each, output) for each in replicas]
    num_good = num_all = 0
    until_s = min(until_s, from_s + _MOST_ARRIVALS / rate_rps)
    for number, time in enumerate(accumulate(cycle(_GAPS))):
        arrival_s = time / rate_rps
        if arrival_s >= until_s:
            break
        for each in simulated:
            each.run_until(arrival_s)
        prompt, output = lengths[number % len(lengths)]
        able = [each for each in simulated if each.starts_in_s <= arrival_s] or simulated
        request = _Request(arrival_s, prompt, output)
        request.counts = arrival_s >= from_s
        min(able, key=lambda each: each.cost_s(request)).add(request)
    for each in simulated:
        each.run_until(inf)
        for request in each.done:
            num_all += 1
            num_good += slo.met(
                ttft_s=request.first_s - request.arrival_s,
                tpot_s=(request.done_s - request.first_s) / max(1, request.output - 1),
                end_to_end_s=request.done_s - request.arrival_s,
            )
    return num_good / num_all if num_all else 1.0


class _Request:
    __slots__ = ("arrival_s", "counts", "done_s", "first_s", "left", "output", "prompt")

    def __init__(self, arrival_s: float, prompt: int, output: int) -> None:
        self.arrival_s, self.prompt, self.output = arrival_s, prompt, output
        self.left = prompt
        self.first_s = self.done_s = 0.0
        self.counts = False


class _Replica:
    """A queue, and outputs that end at a step each."""

    def __init__(self, state: ReplicaLoad, output: int) -> None:
        load = state.load
        self.starts_in_s = self._now_s = state.starts_in_s
        self._load, self._curve = load, state.curve
        self._token_s = state.curve.step_s(_STEP_TOKENS, 0) / _STEP_TOKENS
        self._kv_tokens = state.kv_tokens or inf
        self._steps = self._order = 0
        self._context = 0.0
        self._waiting_tokens = 0
        self._decoding: list[tuple[int, int, _Request]] = []  # by the step with which they end
        self._queue: deque[_Request] = deque()
        self.done: list[_Request] = []
        for _ in range(load.num_pending):
            share = load.pending_tokens // load.num_pending
            self.add(_Request(0.0, max(1, share), output))
        for number in range(load.num_running):  # they began at any time before
            context = load.context_tokens // load.num_running
            request = _Request(0.0, max(0, context - output // 2), output)
            self._decode(request, max(1, output * (number + 1) // (load.num_running + 1)))

    def cost_s(self, request: _Request) -> float:
        """Seconds to its first token, and a tenth of those added to others (`PlacementSeconds`)."""
        tokens = self._waiting_tokens + request.prompt * (1 + len(self._decoding) / 10)
        return self._token_s * tokens + max(0.0, self._now_s - request.arrival_s)

    def add(self, request: _Request) -> None:
        self._queue.append(request)
        self._waiting_tokens += request.prompt

    def run_until(self, time_s: float) -> None:
        """The steps that begin before a time."""
        while self._now_s < time_s:
            if self._queue and self._has_place:
                self._prefill()
            elif self._decoding:
                self._decode_until(time_s)
            else:
                self._now_s = time_s
                return

    @property
    def _has_place(self) -> bool:
        if not self._decoding:
            return True
        first = self._queue[0]
        return (
            len(self._decoding) < self._load.max_seqs
            and self._context + first.prompt + first.output <= self._kv_tokens
        )

    def _prefill(self) -> None:
        """A step with parts of prompts beside those who decode."""
        left, pairs = _STEP_TOKENS, 0
        ended = list[_Request]()
        while self._queue and left and (self._has_place or not ended):
            request = self._queue[0]
            taken = min(left, request.left)
            pairs += taken * (request.prompt - request.left)
            left -= taken
            request.left -= taken
            self._waiting_tokens -= taken
            if request.left:
                break
            ended.append(self._queue.popleft())
        num_tokens = len(self._decoding) + _STEP_TOKENS - left
        seconds = self._curve.step_s(num_tokens, self._context)
        self._advance(1, seconds + self._load.linear.pair_s * pairs)
        for request in ended:
            request.first_s = self._now_s
            self._decode(request, request.output - 1)

    def _decode_until(self, time_s: float) -> None:
        step_s = self._curve.step_s(len(self._decoding), self._context)
        left = self._decoding[0][0] - self._steps
        if time_s < inf:
            left = max(1, min(left, ceil((time_s - self._now_s) / step_s)))
        self._advance(left, left * step_s)

    def _advance(self, num_steps: int, seconds: float) -> None:
        self._steps += num_steps
        self._now_s += seconds
        self._context += num_steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._end(heappop(self._decoding)[2])

    def _decode(self, request: _Request, num_steps: int) -> None:
        self._context += request.prompt + request.output - num_steps
        self._order += 1
        if num_steps:
            heappush(self._decoding, (self._steps + num_steps, self._order, request))
        else:
            self._end(request)

    def _end(self, request: _Request) -> None:
        self._context -= request.prompt + request.output
        request.done_s = self._now_s
        if request.counts:
            self.done.append(request)
