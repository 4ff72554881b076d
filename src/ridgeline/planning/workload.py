"""What arrives: traces from a file, or seeded open-loop Poisson arrivals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ridgeline.core.errors import InvalidRequestError


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request: when it is sent, in seconds, and how many tokens go in and come out."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a good answer keeps, in seconds; ``None`` where there is none."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, ttft_s: float, tpot_s: float | None) -> bool:
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


def poisson(
    *,
    rate_rps: float,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    spread: float = 0.0,
    seed: int = 0,
) -> list[Arrival]:
    """Exponential gaps; lengths uniform within ``spread`` of their mean (0: all the same)."""
    rng, now, found = random.Random(seed), 0.0, []

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    for _ in range(num_requests):
        now += rng.expovariate(rate_rps)
        found.append(
            Arrival(
                arrival_s=now,
                prompt_tokens=length(prompt_tokens),
                output_tokens=length(output_tokens),
            )
        )
    return found


def read_trace(path: Path) -> list[Arrival]:
    """JSON lines of ``arrival_s``, ``prompt_tokens`` and ``output_tokens``, in any order.

    Raises:
        InvalidRequestError: the file cannot be read, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The trace {path} cannot be read.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            arrival = msgspec.json.decode(line, type=Arrival)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"{path}, line {number}: {error}") from error
        if arrival.arrival_s < 0 or min(arrival.prompt_tokens, arrival.output_tokens) < 1:
            raise InvalidRequestError(f"{path}, line {number}: values must be positive.")
        found.append(arrival)
    if not found:
        raise InvalidRequestError(f"The trace {path} is empty.")
    return sorted(found, key=lambda arrival: arrival.arrival_s)


def offered_rps(arrivals: Sequence[Arrival]) -> float:
    """Requests per second of a trace."""
    last = max(arrival.arrival_s for arrival in arrivals)
    return len(arrivals) / last if last > 0 else float("inf")
