"""The threshold of a cascade, from answers of both models to a sample of somebody's requests.

Conformal risk control (Angelopoulos et al. 2022, arXiv 2208.02814): for requests like those of the
sample, the chance that the small model's answer is passed on and is wrong is at most ``risk``.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from statistics import fmean
from typing import Any

from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.core.errors import InvalidRequestError
from ridgeline.fleet.cascade import asked_of_small, events_of, score_of, text_of

EXPECTED = "expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """Answers to one request. ``small_is_right`` and ``large_is_right``: as the sample says, or the
    small one's where it is the large one's. Seconds are what each took alone."""

    score: float
    small_is_right: bool
    large_is_right: bool
    small_s: float
    large_s: float

    @property
    def is_loss(self) -> bool:
        """Whether passing the small one's on loses a right answer."""
        return self.large_is_right and not self.small_is_right


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeThreshold:
    """Answers of which the margin is ``threshold`` or more are passed on: of the sample ``kept``.

    ``bound``: of the chance that one is lost, over samples and requests like these. ``right`` and
    ``seconds`` of a request, in the mean: of the small model, the cascade and the large one;
    ``mixed_right``: of as many requests to the small model drawn at random.
    """

    threshold: float
    bound: float
    kept: float
    lost: float
    right: tuple[float, float, float]
    seconds: tuple[float, float, float]
    mixed_right: float

    @property
    def is_worth_it(self) -> bool:
        """Whether it costs less than the large model, and does better than chance."""
        return self.seconds[1] < self.seconds[2] and self.right[1] > self.mixed_right

    def told(self) -> dict[str, Any]:
        """Plain values; no threshold where no answer of the small model is passed on."""
        names = ("small", "cascade", "large")
        return {
            **asdict(self),
            "threshold": None if self.threshold == inf else self.threshold,
            "right": dict(zip(names, self.right, strict=True)),
            "seconds": dict(zip(names, self.seconds, strict=True)),
        }


def cascade_threshold(pairs: Sequence[JudgedPair], risk: float) -> CascadeThreshold:
    """The lowest threshold whose risk is bounded: (n R + 1) / (n + 1) ≤ ``risk``, with R the share
    of the n pairs that it loses.

    Raises:
        InvalidRequestError: the sample is too small to bound so low a risk.
    """
    count = len(pairs)
    if 1 / (count + 1) > risk:
        needed = ceil(1 / risk) - 1
        raise InvalidRequestError(
            f"{count} requests bound no risk below {1 / (count + 1):.3f}: for {risk:g} the sample "
            f"needs {needed}."
        )
    threshold, lost = inf, 0
    for score in sorted({each.score for each in pairs if each.score > -inf}, reverse=True):
        lost += sum(each.is_loss for each in pairs if each.score == score)
        if (lost + 1) / (count + 1) > risk:
            break
        threshold = score
    return at_threshold(pairs, threshold)


def at_threshold(pairs: Sequence[JudgedPair], threshold: float) -> CascadeThreshold:
    """What a threshold makes of a sample."""
    count = len(pairs)
    kept = [each.score >= threshold for each in pairs]
    num_lost = sum(p.is_loss for p, k in zip(pairs, kept, strict=True) if k)
    share = fmean(kept)
    small, large = fmean(p.small_is_right for p in pairs), fmean(p.large_is_right for p in pairs)
    small_s, large_s = fmean(p.small_s for p in pairs), fmean(p.large_s for p in pairs)
    right = fmean(
        pair.small_is_right if is_kept else pair.large_is_right
        for pair, is_kept in zip(pairs, kept, strict=True)
    )
    large_part_s = sum(p.large_s for p, k in zip(pairs, kept, strict=True) if not k) / count
    return CascadeThreshold(
        threshold=threshold,
        bound=(num_lost + 1) / (count + 1),
        kept=share,
        lost=num_lost / count,
        right=(small, right, large),
        seconds=(small_s, small_s + large_part_s, large_s),
        mixed_right=share * small + (1 - share) * large,
    )


async def ask_pairs(
    sample: Sequence[dict[str, Any]], small: HttpTarget, large: HttpTarget
) -> list[JudgedPair]:
    """Ask both models, one request after another, so that seconds are those of one alone.

    A request is a body with ``prompt`` or ``messages``, and perhaps the text that is ``expected``
    within a right answer.

    Raises:
        InvalidRequestError: a request is not one of a cascade.
        NetworkError: a model does not answer.
    """
    for target in (small, large):
        target.with_model(await target.first_model())
    pairs = []
    for number, request in enumerate(sample, start=1):
        body = {k: v for k, v in request.items() if k not in (EXPECTED, "model", "stream")}
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        asked = asked_of_small(path, body, "")
        if asked is None:
            raise InvalidRequestError(f"Request {number} is one for the large model alone.")
        begin_s = time.perf_counter()
        first = events_of(await small.ask(path, {k: v for k, v in asked.items() if k != "model"}))
        small_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        second = events_of(await large.ask(path, body))
        large_s = time.perf_counter() - begin_s
        texts, expected = [text_of(each) for each in (first, second)], request.get(EXPECTED)
        right = [text == texts[1] if expected is None else expected in text for text in texts]
        pairs.append(
            JudgedPair(
                score=score_of(first),
                small_is_right=right[0],
                large_is_right=right[1],
                small_s=small_s,
                large_s=large_s,
            )
        )
    return pairs
