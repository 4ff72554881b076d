"""What is sent: four kinds of traffic, or a trace, and the tokens that prompts are made of."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import msgspec

from ridgeline.bench.serve.workload import Dialogue, Turn
from ridgeline.planning.workload import Arrival
from ridgeline.roofline.slo import Slo

_RISE = (0.25, 1.75)  # times the mean rate, at the beginning and at the end
_NOMINAL_CONTEXT = 4096  # for which lengths are given; shorter contexts have shorter requests


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPattern:
    """A kind of traffic: medians of tokens and how far they scatter (of logarithms), prefixes that
    requests share, and limits of latency that are usual for it. ``is_offline``: all is there at
    once."""

    prompt_tokens: int
    output_tokens: int
    sigma: float
    prefix_tokens: int = 0
    num_prefixes: int = 1
    slo: Slo = field(default_factory=Slo)
    is_offline: bool = False


PATTERNS = {
    "chat": TrafficPattern(
        prompt_tokens=200, output_tokens=150, sigma=0.6, slo=Slo(ttft_s=0.5, tpot_s=0.1)
    ),
    "rag": TrafficPattern(
        prompt_tokens=2000, output_tokens=100, sigma=0.3, slo=Slo(ttft_s=2.0, tpot_s=0.15)
    ),
    "agents": TrafficPattern(
        prompt_tokens=300,
        output_tokens=80,
        sigma=0.5,
        prefix_tokens=1500,
        num_prefixes=4,
        slo=Slo(ttft_s=1.0, tpot_s=0.15),
    ),
    "batch": TrafficPattern(prompt_tokens=500, output_tokens=100, sigma=0.5, is_offline=True),
}


def pattern_arrivals(
    pattern: TrafficPattern,
    *,
    rate_rps: float | None,
    num_requests: int,
    context: int,
    is_rising: bool = False,
    seed: int = 0,
) -> tuple[Arrival, ...]:
    """Poisson arrivals at a rate, or all at once; the same lengths for the same seed, whatever the
    rate. A rate that ``is_rising`` goes from a quarter of ``rate_rps`` to seven quarters, so that
    every machine meets the rate at which it falls behind. ``context`` is the model's, which a
    request never exceeds."""
    scale = min(1.0, context / _NOMINAL_CONTEXT)
    rng, gaps, now = random.Random(f"lengths {seed}"), random.Random(f"gaps {seed}"), 0.0
    prefix = round(scale * pattern.prefix_tokens)
    room = context - prefix - 1

    def length(median: int, most: int) -> int:
        return max(1, min(most, round(scale * median * rng.lognormvariate(0.0, pattern.sigma))))

    found = []
    for _ in range(num_requests):
        own = length(pattern.prompt_tokens, room // 2)
        output = length(pattern.output_tokens, room - own)
        name = f"prefix {rng.randrange(pattern.num_prefixes)}" if prefix else ""
        found.append(
            Arrival(
                arrival_s=now,
                prompt_tokens=prefix + own,
                output_tokens=output,
                prefix=name,
                prefix_tokens=prefix,
            )
        )
        now += 0.0 if rate_rps is None else gaps.expovariate(rate_rps)
    if not is_rising:
        return tuple(found)
    span_s = max(now, found[-1].arrival_s)
    return tuple(
        msgspec.structs.replace(each, arrival_s=span_s * _rising(each.arrival_s / span_s))
        for each in found
    )


def _rising(share: float) -> float:
    """When a share of the arrivals is there, of the time that they take together.

    The rate at t is a + (b − a)·t, and the share until then its integral, a·t + (b − a)·t² / 2.
    """
    low, slope = _RISE[0], _RISE[1] - _RISE[0]
    return (sqrt(low**2 + 2 * slope * share) - low) / slope


def at_once(arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The same requests, all of them at the beginning."""
    return tuple(msgspec.structs.replace(each, arrival_s=0.0) for each in arrivals)


def first_seconds(
    arrivals: Sequence[Arrival], seconds: float, *, least: int
) -> tuple[Arrival, ...]:
    """The part of a trace that arrives in the first ``seconds``, from its first request on, and at
    the least so many requests."""
    begin_s = arrivals[0].arrival_s
    part = [
        msgspec.structs.replace(each, arrival_s=each.arrival_s - begin_s)
        for number, each in enumerate(arrivals)
        if number < least or each.arrival_s - begin_s <= seconds
    ]
    return tuple(part)


def dialogues(
    arrivals: Sequence[Arrival], corpus: Sequence[int], *, seed: int
) -> tuple[Dialogue, ...]:
    """Requests of these lengths, cut from a text's tokens: others for another ``seed``, so that no
    cache of one visit is of use to the next. Equal prefixes are equal text."""

    def cut(name: str, length: int) -> tuple[int, ...]:
        start = random.Random(f"{name} {seed}").randrange(len(corpus))
        return tuple(corpus[(start + offset) % len(corpus)] for offset in range(length))

    return tuple(
        Dialogue(
            user=number,
            at_s=each.arrival_s,
            turns=(
                Turn(
                    new_token_ids=cut(each.prefix, each.prefix_tokens)
                    + cut(f"own {number}", each.prompt_tokens - each.prefix_tokens),
                    max_tokens=each.output_tokens,
                ),
            ),
        )
        for number, each in enumerate(arrivals)
    )
