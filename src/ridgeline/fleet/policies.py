"""Which engine a request goes to: policies, of which one goes by predicted seconds."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.scheduler.prediction import LinearPredictor

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MOST_TOKENS = 1 << 62
PolicyName = Literal["least-seconds", "least-loaded", "prefix", "session", "round-robin", "price"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine has to do, as its router knows it, and what that costs.

    ``pending_tokens``: of the prompts of ``num_pending`` requests without a first token, those that
    are not cached. ``num_running`` requests decode, over ``context_tokens`` together.
    ``pass_s``: of a step, before anything is in it. ``max_seqs`` run at once, and ``kv_tokens`` of
    KV are held.
    """

    linear: LinearPredictor
    pass_s: float
    max_seqs: int
    kv_tokens: int = MOST_TOKENS
    pending_tokens: int = 0
    num_pending: int = 0
    num_running: int = 0
    context_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_pending + self.num_running


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine that may take the request, and how many tokens of its prompt it has cached."""

    name: str
    load: EngineLoad
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request, as far as the choice goes: its expected tokens, and whose session it is."""

    prompt_tokens: int
    output_tokens: int
    session: bytes = b""


class Policy(Protocol):
    """Orders engines for a request."""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        """All of them, the best first."""
        ...


@dataclass(frozen=True, slots=True)
class LoadColumns:
    """The loads of engines as columns, an element for each: what `EngineLoad` says, and how many
    tokens of the prompt are cached. Of its seconds, what `LinearPredictor` is made of."""

    pass_s: Floats
    token_s: Floats
    pair_s: Floats
    max_seqs: Integers
    kv_tokens: Integers
    pending_tokens: Integers
    num_pending: Integers
    num_running: Integers
    context_tokens: Integers
    cached_tokens: Integers

    @classmethod
    def of_choices(cls, choices: Sequence[EngineChoice]) -> "LoadColumns":
        rows = [
            (load.pass_s, load.linear.token_s, load.linear.pair_s, load.max_seqs,
             load.kv_tokens, load.pending_tokens, load.num_pending, load.num_running,
             load.context_tokens, each.cached_tokens)
            for each in choices
            for load in [each.load]
        ]  # fmt: skip
        seconds = np.array([row[:3] for row in rows], np.float64).T
        counts = np.array([row[3:] for row in rows], np.int64).T
        return cls(*seconds, *counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSeconds:
    """Predicted seconds for each engine: to the request's first token, and those that it adds to
    all others."""

    ttft_s: Floats
    added_s: Floats

    @property
    def weighted_s(self) -> Floats:
        """Seconds as they are felt: a second before the first token as ten within the output.

        So much a chat may take of either: 0.5 s to the first token, and 5 s for a hundred more.
        """
        return self.ttft_s + self.added_s / 10


def placement_seconds(wanted: Wanted, engines: LoadColumns) -> PlacementSeconds:
    """What it costs to place a request on each of the engines.

    The prompts before it are computed first, then its own, whose cached part is free. Those who
    decode wait while its prompt is computed, and then half of its tokens long (they end at any time
    meanwhile) for its part of each step. Where all places are taken, a place is free when one
    output in ``max_seqs`` ends: it waits for that, and whoever comes later does.
    """

    def segment_s(num_tokens: Integers | int, context: Integers | int) -> Floats:
        pairs = num_tokens * (context + (num_tokens + 1) / 2)
        return engines.token_s * num_tokens + engines.pair_s * pairs

    running = engines.num_running
    requests = engines.num_pending + running
    cached = np.minimum(engines.cached_tokens, max(0, wanted.prompt_tokens - 1))
    own_s = segment_s(wanted.prompt_tokens - cached, cached)
    pending_s = segment_s(engines.pending_tokens, 0)
    part_s = segment_s(1, wanted.prompt_tokens + wanted.output_tokens // 2)
    context = engines.context_tokens // np.maximum(running, 1)
    step_s = engines.pass_s + running * segment_s(1, context)
    ahead = np.maximum(0, requests + 1 - engines.max_seqs)
    queue_s = ahead * wanted.output_tokens * step_s / engines.max_seqs
    together = np.minimum(requests, engines.max_seqs)
    return PlacementSeconds(
        ttft_s=queue_s + pending_s + own_s + step_s,
        added_s=running * own_s + together * part_s * wanted.output_tokens / 2,
    )


class ByPredictedSeconds:
    """The least predicted seconds for all, those who are there and the one who comes."""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        seconds = placement_seconds(wanted, LoadColumns.of_choices(candidates)).weighted_s.tolist()
        order = sorted(
            range(len(candidates)),
            key=lambda n: (seconds[n], _weight(wanted.session, candidates[n].name)),
        )
        return [candidates[n] for n in order]

    def cheapest(self, wanted: Wanted, engines: LoadColumns, names: Sequence[str]) -> int:
        """The index of the first of `ranked`."""
        seconds = placement_seconds(wanted, engines).weighted_s
        equal = np.flatnonzero(seconds == seconds.min()).tolist()
        return min(equal, key=lambda n: _weight(wanted.session, names[n]) if equal[1:] else 0)


class LeastLoaded:
    """The fewest requests in progress; no prompt is looked at."""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        return sorted(candidates, key=lambda c: (c.load.num_requests, _weight(b"", c.name)))


class ByPrefix:
    """The longest cached prefix, where it is half of the prompt or more; else the least loaded.

    Also the least loaded where one engine has ``MOST_AHEAD`` requests more than another, or what is
    cached would draw everything to one engine (as SGLang's router does it).
    """

    MIN_SHARE = 0.5
    MOST_AHEAD = 8

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        counts = [each.load.num_requests for each in candidates]
        by_load = LeastLoaded().ranked(wanted, candidates)
        if max(counts) - min(counts) > self.MOST_AHEAD:
            return by_load
        share = self.MIN_SHARE * wanted.prompt_tokens
        by_prefix = sorted(by_load, key=lambda each: -each.cached_tokens)
        return by_prefix if by_prefix[0].cached_tokens >= max(1, share) else by_load


class BySession:
    """A session stays with its engine while that is there (rendezvous hashing, Thaler 1996)."""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        return sorted(candidates, key=lambda each: _weight(wanted.session, each.name))


class RoundRobin:
    """Each in its turn."""

    def __init__(self) -> None:
        self._last = ""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        ordered = sorted(candidates, key=lambda each: (each.name <= self._last, each.name))
        self._last = ordered[0].name
        return ordered


POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "least-seconds": ByPredictedSeconds,
    "least-loaded": LeastLoaded,
    "prefix": ByPrefix,
    "session": BySession,
    "round-robin": RoundRobin,
    "price": ByPredictedSeconds,  # the name of least-seconds before
}


def _weight(session: bytes, name: str) -> int:
    """Of an engine for a session: the same in every router."""
    digest = hashlib.blake2b(name.encode(), key=session[:64], digest_size=8)
    return int.from_bytes(digest.digest(), "big")
