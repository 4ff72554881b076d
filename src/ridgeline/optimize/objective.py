"""What is to be better: one number of a visit, measured or simulated, and limits of quality."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ridgeline.bench.serve.metrics import RequestTrace
from ridgeline.core.errors import InvalidRequestError
from ridgeline.evaluation import Quality
from ridgeline.planning import Traffic
from ridgeline.roofline.slo import Slo


class Objective(StrEnum):
    """What is optimized; each has a unit."""

    GOODPUT = "goodput"
    COST = "cost"
    LATENCY = "latency"
    MEMORY = "memory"

    @property
    def unit(self) -> str:
        """Of `value`."""
        return {
            Objective.GOODPUT: "good requests/s",
            Objective.COST: "output tokens/s of good requests",
            Objective.LATENCY: "answers/s of a request's own time",
            Objective.MEMORY: "good requests/s",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request; seconds since its arrival but for ``arrival_s`` and ``done_s``,
    which are on one clock. One that failed has no ``ttft_s``."""

    arrival_s: float
    done_s: float
    ttft_s: float | None
    tpot_s: float | None
    end_to_end_s: float
    output_tokens: int

    def is_good(self, slo: Slo) -> bool:
        """Answered within every limit."""
        return self.ttft_s is not None and slo.met(
            ttft_s=self.ttft_s, tpot_s=self.tpot_s, end_to_end_s=self.end_to_end_s
        )


def measured_outcomes(traces: Sequence[RequestTrace]) -> tuple[Outcome, ...]:
    """Of requests that were sent to an engine; the first is due at 0."""
    begin_s = min(trace.scheduled_s for trace in traces)
    return tuple(
        Outcome(
            arrival_s=trace.scheduled_s - begin_s,
            done_s=trace.finished_s - begin_s,
            ttft_s=trace.ttft_s if trace.is_complete else None,
            tpot_s=trace.tpot_s if trace.is_complete else None,
            end_to_end_s=trace.finished_s - trace.scheduled_s,
            output_tokens=trace.num_output_tokens,
        )
        for trace in traces
    )


def simulated_outcomes(traffic: Traffic) -> tuple[Outcome, ...]:
    """Of requests that were sent to a simulated engine."""
    begin_s = min(answer.arrival.arrival_s for answer in traffic.answers)
    return tuple(
        Outcome(
            arrival_s=answer.arrival.arrival_s - begin_s,
            done_s=answer.done_s - begin_s,
            ttft_s=answer.timings.ttft_s,
            tpot_s=answer.timings.tpot_s,
            end_to_end_s=answer.timings.end_to_end_s,
            output_tokens=answer.arrival.output_tokens,
        )
        for answer in traffic.answers
    )


def value(objective: Objective, outcomes: Sequence[Outcome], slo: Slo) -> float:
    """More is better; above 0 even where no request is good, as if half of one were.

    Goodput counts good requests, and cost their output tokens, per second from the first arrival to
    the last end: a machine costs the same whichever runs. Latency is the inverse of the mean time
    from arrival to end, which of a failed request is the whole run. Memory, which is known without
    measuring, must not cost goodput.
    """
    wall_s = max(each.done_s for each in outcomes) - min(each.arrival_s for each in outcomes)
    good = [each for each in outcomes if each.is_good(slo)]
    if objective is Objective.LATENCY:
        spent_s = (wall_s if each.ttft_s is None else each.end_to_end_s for each in outcomes)
        return len(outcomes) / sum(spent_s)
    tokens = sum(each.output_tokens for each in outcomes) / len(outcomes)
    if objective is Objective.COST:
        return max(sum(each.output_tokens for each in good), tokens / 2) / wall_s
    return max(len(good), 0.5) / wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLimits:
    """How far from the unquantized model answers may be; ``None``: that does not matter.

    ``kl`` is the mean divergence in nats, ``top1`` the share of positions with the same most likely
    token, ``ppl`` the perplexity over the reference's.
    """

    kl: float | None = None
    top1: float | None = None
    ppl: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.kl, self.top1, self.ppl))

    def missed(self, quality: Quality) -> str | None:
        """The first limit that is missed, as a phrase."""
        ratio = quality.perplexity / quality.reference_perplexity
        if self.kl is not None and quality.kl > self.kl:
            return f"KL {quality.kl:.2g} > {self.kl:g}"
        if self.top1 is not None and quality.same_top < self.top1:
            return f"same top token {quality.same_top:.1%} < {self.top1:.1%}"
        if self.ppl is not None and ratio > self.ppl:
            return f"perplexity × {ratio:.3f} > {self.ppl:g}"
        return None

    def __str__(self) -> str:
        parts = (("kl<=", self.kl), ("top1>=", self.top1), ("ppl<=", self.ppl))
        return ",".join(f"{name}{limit:g}" for name, limit in parts if limit is not None) or "none"


_LIMIT = re.compile(r"\s*(?:(kl|ppl)\s*<=|(top1)\s*>=)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*")


def parse_quality(text: str) -> QualityLimits:
    """``kl<=0.02,top1>=0.95,ppl<=1.02``, or ``none``.

    Raises:
        InvalidRequestError: it is something else.
    """
    limits: dict[str, float] = {}
    for part in () if text.strip() == "none" else text.split(","):
        match = _LIMIT.fullmatch(part)
        name = (match[1] or match[2]) if match else None
        if match is None or name is None or name in limits:
            raise InvalidRequestError(
                "--quality is written kl<=0.02,top1>=0.95,ppl<=1.02 (perplexity over the "
                "unquantized model's), or none."
            )
        limits[name] = float(match[3])
    return QualityLimits(**limits)
