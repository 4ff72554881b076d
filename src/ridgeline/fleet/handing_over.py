"""Which engines a router takes for the prompt of a request and for the rest of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.pairs import PairSeconds, pair_seconds, prompt_seconds, transfer_seconds
from ridgeline.fleet.policies import Floats, LoadColumns
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.roles import Roles

_LATENCY_S = 0.03  # until the last blocks of a prompt are written, and have been asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTo:
    """Where a request is sent, and whether it ends there with its first token. ``alone_s``: the
    predicted seconds to that, where nothing is to be computed before; else 0."""

    engine: RoutedEngine
    hands_over: bool = False
    alone_s: float = 0.0


class HandingOver:
    """Goes by `Roles`; where they say nothing, each request is one engine's, by the policy.

    ``always``: every request that can be is handed over, whatever that costs.
    """

    def __init__(self, *, always: bool = False) -> None:
        self.roles = Roles()
        self._always = always

    def place(
        self, request: RoutedRequest, engines: Sequence[RoutedEngine], chosen: int, now_s: float
    ) -> SentTo:
        """``chosen`` is the policy's."""
        transfer_s = self._mean_transfer_s(request, engines)
        if transfer_s is None:
            return SentTo(engine=engines[chosen])
        columns = LoadColumns.of_choices([each.candidate(request) for each in engines])
        shares = self._shares(engines, columns, now_s)
        hands_over = False
        if shares is not None:
            pairs = self._pairs(request, engines, columns, shares)
            if request.may_be_handed_over:
                chosen, rest = self._of_two(pairs).best()
                hands_over = rest != chosen
            else:
                chosen = pairs.best_alone()
        engine = engines[chosen]
        cached = int(columns.cached_tokens[chosen])
        prompt_s = prompt_seconds(engine.state.linear, request.wanted, cached)
        self.roles.note(now_s, request.wanted, prompt_s=prompt_s, transfer_s=transfer_s)
        is_first = not engine.tracker.num_pending
        alone_s = prompt_s + engine.state.pass_s if is_first else 0.0
        return SentTo(engine=engine, hands_over=hands_over, alone_s=alone_s)

    def next(
        self,
        request: RoutedRequest,
        engines: Sequence[RoutedEngine],
        source: RoutedEngine,
        now_s: float,
    ) -> RoutedEngine:
        """Where a request goes on whose prompt is computed on ``source``, which is one of them."""
        columns = LoadColumns.of_choices([each.candidate(request) for each in engines])
        shares = self._shares(engines, columns, now_s)
        if shares is None:
            return source
        pairs = self._of_two(self._pairs(request, engines, columns, shares))
        return engines[pairs.best_after(engines.index(source))]

    def _of_two(self, pairs: PairSeconds) -> PairSeconds:
        return pairs.of_two() if self._always else pairs

    def _shares(
        self, engines: Sequence[RoutedEngine], columns: LoadColumns, now_s: float
    ) -> Floats | None:
        if self._always:
            return np.zeros(len(engines))
        return self.roles.shares(now_s, [each.name for each in engines], columns)

    def _pairs(
        self,
        request: RoutedRequest,
        engines: Sequence[RoutedEngine],
        columns: LoadColumns,
        shares: Floats,
    ) -> PairSeconds:
        rates = [[into.source_bytes_per_s(source) for into in engines] for source in engines]
        sizes = [each.state.kv_token_bytes for each in engines]
        transfer_s = transfer_seconds(request.wanted.prompt_tokens, sizes, rates, _LATENCY_S)
        return pair_seconds(request.wanted, columns, shares, transfer_s / self.roles.scale)

    def _mean_transfer_s(
        self, request: RoutedRequest, engines: Sequence[RoutedEngine]
    ) -> float | None:
        """From an engine to another that can read of it; ``None`` where no one can."""
        seconds = []
        for source, into in permutations(engines, 2):
            rate, size = into.source_bytes_per_s(source), source.state.kv_token_bytes
            if rate and size:
                seconds.append(request.wanted.prompt_tokens * size / rate + _LATENCY_S)
        return sum(seconds) / len(seconds) if seconds else None
