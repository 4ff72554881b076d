"""How many engines should compute prompts alone: roles as the load wants them, for now."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import Literal

import numpy as np

from ridgeline.fleet.policies import Floats, LoadColumns, Wanted

Disaggregate = Literal["auto", "always", "off"]

_MEAN_S = 15.0  # over which the load is averaged
_EVERY_S = 1.0  # between decisions
_MARGIN = 0.1  # of the seconds without roles, that they have to save
_STAYING_MARGIN = 0.05  # once they are there
_LONGEST_S = 1e6
_MIN_REQUESTS = 8.0  # seen of late, before anything is said of the load
_SMOOTHING = 0.05  # of the length of outputs
_QUANTILE, _SCALE_STEP = 0.2, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Requests a second; of each, in the mean, the seconds of its prompt on an engine, of its KV on
    the wire, the tokens of its output and of all of it. Of the engines, in the mean, the seconds of
    a step before anything is in it, of a sequence in it, and how many sequences and tokens fit."""

    rate_rps: float
    prompt_s: float
    transfer_s: float
    output_tokens: float
    tokens: float
    pass_s: float
    part_s: float
    max_seqs: float
    kv_tokens: float


def felt_seconds(load: FleetLoad, count: int, num_prefill: int) -> float:
    """Seconds to a request's first token and a tenth of those after it (`PlacementSeconds`), in the
    mean, where so many of the engines compute prompts alone; 0: all do both. Infinite: too many.

    Prompts wait for each other as in M/D/c, by Sakasegawa's approximation of M/M/c (1977) halved.
    A token takes a step, longer by the share of the time that its engine spends on prompts, and of
    as many sequences as there are at that rate (Little). Each engine has one wire.
    """
    both = num_prefill == 0
    servers = count if both else num_prefill
    decoding = count if both else count - num_prefill
    busy = load.rate_rps * (load.prompt_s + load.pass_s) / servers
    if busy >= 1:
        return inf
    wait: float = busy ** (sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)) / 2
    share = busy if both else 0.0
    tokens_s = load.rate_rps * load.output_tokens / decoding
    left = 1 - share - tokens_s * load.part_s
    if left <= 0:
        return inf
    token_s = load.pass_s / left
    running = tokens_s * token_s
    if running > load.max_seqs or running * load.tokens > load.kv_tokens:
        return inf
    ttft_s = load.prompt_s * (1 + wait) + load.pass_s
    after_s = load.output_tokens * token_s
    if not both:
        wire_busy = load.rate_rps * load.transfer_s / min(num_prefill, decoding)
        if wire_busy >= 1:
            return inf
        after_s += load.transfer_s * (1 + wire_busy / (1 - wire_busy) / 2) + token_s
    return ttft_s + after_s / 10


class Roles:
    """Which engines compute prompts alone: how many that are, follows from the mean of the load.

    ``prefilling``: their names; empty where all do both. ``scale``: what predicted seconds have to
    be multiplied by, as prompts that nothing was before have shown.
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._noted_s = self._begun_s = -inf
        self._updated_s = -inf
        self._busy = 0.0
        self._output_tokens: float | None = None
        self.scale, self._has_scale = 1.0, False
        self.prefilling: frozenset[str] = frozenset()

    def note(self, now_s: float, wanted: Wanted, *, prompt_s: float, transfer_s: float) -> None:
        """A request was sent, whose prompt takes so long, and so long its KV to another engine."""
        if self._begun_s == -inf:
            self._noted_s = self._begun_s = now_s
        self._sums = self._sums.after(now_s - self._noted_s, wanted, prompt_s, transfer_s)
        self._noted_s = now_s

    def note_seconds(self, predicted_s: float, measured_s: float) -> None:
        """A prompt that nothing was before took so long to its first token."""
        if predicted_s <= 0:
            return
        ratio = min(1e3, max(1e-3, measured_s / predicted_s))
        if not self._has_scale:
            self._has_scale, self.scale = True, ratio
        # Others come while it is computed: a low quantile is what it takes itself.
        self.scale *= 1 + _SCALE_STEP * (_QUANTILE if ratio > self.scale else _QUANTILE - 1)

    def note_output(self, num_tokens: int) -> None:
        """An output has ended, and was so long."""
        if self._output_tokens is None:
            self._output_tokens = float(num_tokens)
        self._output_tokens += _SMOOTHING * (num_tokens - self._output_tokens)

    def shares(self, now_s: float, names: Sequence[str], engines: LoadColumns) -> Floats | None:
        """What share of its time each engine is to spend on prompts; ``None``: all do both.

        The engines for prompts are those that were, and then those where the fewest decode.
        """
        if now_s >= self._updated_s + _EVERY_S:
            self._updated_s = now_s
            self._update(now_s, names, engines)
        found = [self._busy if name in self.prefilling else 0.0 for name in names]
        return np.array(found) if any(found) and not all(found) else None

    def load(self, now_s: float, engines: LoadColumns) -> FleetLoad:
        """The mean of the load, and of the engines."""
        sums, scale = self._sums, self.scale
        seen_s = _MEAN_S * (1 - exp((self._begun_s - now_s) / _MEAN_S))
        output = self._output_tokens or sums.output_tokens / sums.count
        context = sums.prompt_tokens / sums.count + output / 2
        return FleetLoad(
            rate_rps=sums.count * exp((self._noted_s - now_s) / _MEAN_S) / max(seen_s, 1e-9),
            prompt_s=scale * sums.prompt_s / sums.count,
            transfer_s=sums.transfer_s / sums.count,
            output_tokens=output,
            tokens=context,
            pass_s=scale * float(engines.pass_s.mean()),
            part_s=scale * float((engines.token_s + engines.pair_s * context).mean()),
            max_seqs=float(engines.max_seqs.mean()),
            kv_tokens=float(engines.kv_tokens.mean()),
        )

    def _update(self, now_s: float, names: Sequence[str], engines: LoadColumns) -> None:
        before, count = self.prefilling, len(names)
        self.prefilling = frozenset()
        if self._sums.count < _MIN_REQUESTS:
            return
        load = self.load(now_s, engines)
        both_s = felt_seconds(load, count, 0)
        split = min(range(1, count), key=lambda k: felt_seconds(load, count, k), default=0)
        most = 1 - (_STAYING_MARGIN if before else _MARGIN)
        if not split or felt_seconds(load, count, split) >= most * min(both_s, _LONGEST_S):
            return
        order = sorted(
            range(count), key=lambda n: (names[n] not in before, engines.num_running[n], names[n])
        )
        self.prefilling = frozenset(names[n] for n in order[:split])
        self._busy = load.rate_rps * load.prompt_s / split


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of requests, each of which counts less the longer ago it was."""

    count: float = 0.0
    prompt_s: float = 0.0
    transfer_s: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def after(self, seconds: float, wanted: Wanted, prompt_s: float, transfer_s: float) -> "_Sums":
        kept = exp(-seconds / _MEAN_S)
        return _Sums(
            self.count * kept + 1,
            self.prompt_s * kept + prompt_s,
            self.transfer_s * kept + transfer_s,
            self.output_tokens * kept + wanted.output_tokens,
            self.prompt_tokens * kept + wanted.prompt_tokens,
        )
