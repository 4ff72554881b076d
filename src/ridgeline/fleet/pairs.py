"""Which engine computes a prompt and which goes on with it: pairs (p, d), of which p = d is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from ridgeline.fleet.policies import Floats, LoadColumns, Wanted, placement_seconds
from ridgeline.scheduler.prediction import LinearPredictor

_MOST_SHARE = 0.95
_MARGIN = 0.02  # of the best engine's own seconds that another's has to be below


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSeconds:
    """Predicted seconds, as `PlacementSeconds.weighted_s` weighs them: of the prompt on each
    engine, and of the rest on each engine (a column) after the prompt on each (a row)."""

    prefill_s: Floats
    decode_s: Floats

    def of_two(self) -> "PairSeconds":
        """Without one engine for all of a request, where another can go on with it."""
        rest_s = self.decode_s.copy()
        has_other = np.isfinite(rest_s).sum(axis=1) > 1
        rest_s[np.diag_indices(len(rest_s))] = np.where(has_other, inf, np.diagonal(rest_s))
        return PairSeconds(prefill_s=self.prefill_s, decode_s=rest_s)

    def best(self) -> tuple[int, int]:
        """The cheapest pair; one of two engines only where it is clearly below the best of one."""
        total = self.prefill_s[:, None] + self.decode_s
        alone = self.best_alone()
        prefill, decode = divmod(int(np.argmin(total)), len(total))
        if total[prefill, decode] < (1 - _MARGIN) * total[alone, alone]:
            return prefill, decode
        return alone, alone

    def best_alone(self) -> int:
        """The cheapest engine for all of it."""
        return int(np.argmin(self.prefill_s + np.diagonal(self.decode_s)))

    def best_after(self, prefill: int) -> int:
        """Where to go on, once the prompt is on an engine."""
        return int(np.argmin(self.decode_s[prefill]))


def pair_seconds(
    wanted: Wanted, engines: LoadColumns, shares: Floats, transfer_s: Floats
) -> PairSeconds:
    """What a request costs on each pair of engines.

    On p, that is what `placement_seconds` says of its prompt: the time to the first token, and
    those who decode there meanwhile. On d, what its part of each step is to who decodes there, and
    its own output: the steps, longer by the ``shares`` of the time that d spends on prompts, since
    whoever decodes there waits for the prompts that come. ``transfer_s[p, d]`` go from one to the
    other, before the second token; infinite where d cannot read of p.
    """
    placed = placement_seconds(wanted, engines)
    running, out = engines.num_running, wanted.output_tokens
    cached = np.minimum(engines.cached_tokens, max(0, wanted.prompt_tokens - 1))
    own = wanted.prompt_tokens - cached
    own_s = engines.token_s * own + engines.pair_s * own * (cached + (own + 1) / 2)
    stalled_s = running * own_s
    context = wanted.prompt_tokens + out // 2
    part_s = engines.token_s + engines.pair_s * (context + 1)
    others = engines.context_tokens // np.maximum(running, 1)
    others_s = engines.token_s + engines.pair_s * (others + 1)
    step_s = engines.pass_s + running * others_s + part_s
    output_s = out * step_s / (1 - np.minimum(shares, _MOST_SHARE))
    rest_s = (placed.added_s - stalled_s + output_s) / 10
    ahead = np.maximum(0, running + 1 - engines.max_seqs)
    queue_s = ahead * out * step_s / engines.max_seqs
    enters_s = (transfer_s + queue_s + step_s) / 10
    decode_s = rest_s[None, :] + np.where(np.eye(len(rest_s), dtype=bool), 0.0, enters_s)
    return PairSeconds(prefill_s=placed.ttft_s + stalled_s / 10, decode_s=decode_s)


def transfer_seconds(
    tokens: int, token_bytes: Sequence[float], bytes_per_s: npt.ArrayLike, latency_s: float
) -> Floats:
    """Seconds for the KV of a prompt from each engine (a row) to each: 0 to itself, and infinite
    where ``bytes_per_s`` is 0, or what a token takes is not known."""
    rate = np.asarray(bytes_per_s, np.float64)
    sizes = tokens * np.asarray(token_bytes, np.float64)[:, None]
    known = (rate > 0) & (sizes > 0)
    seconds = np.where(known, latency_s + sizes / np.where(known, rate, 1.0), inf)
    np.fill_diagonal(seconds, 0.0)
    return seconds


def prompt_seconds(linear: LinearPredictor, wanted: Wanted, cached_tokens: int) -> float:
    """What a prompt takes on an engine that has some of it."""
    cached = min(cached_tokens, max(0, wanted.prompt_tokens - 1))
    return linear.segment_seconds(wanted.prompt_tokens - cached, cached)
