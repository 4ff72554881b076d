"""What arrives: traces from a file, or seeded open-loop Poisson arrivals."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.rounding import ceil_div

_LATEST_S = 1e10  # of a trace; a clock of floats that starts there still tells microseconds apart


class Arrival(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One request: when it is sent, in seconds, and how many tokens go in and come out.

    Requests of the same ``prefix`` begin with the same ``prefix_tokens`` tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens


class _Line(msgspec.Struct, frozen=True):
    """A line of a trace, as ``ridgeline bench serve --trace`` reads them."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0


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


def paced(arrivals: Sequence[Arrival], rate_rps: float) -> list[Arrival]:
    """Random arrivals, each third of which takes as long as it does on average."""
    found, before_s, begin_s = list[Arrival](), 0.0, 0.0
    third = ceil_div(len(arrivals), 3)
    for first in range(0, len(arrivals), third):
        part = arrivals[first : first + third]
        last_s = part[-1].arrival_s
        scale = len(part) / rate_rps / (last_s - before_s)
        found += [
            msgspec.structs.replace(each, arrival_s=begin_s + scale * (each.arrival_s - before_s))
            for each in part
        ]
        before_s, begin_s = last_s, found[-1].arrival_s
    return found


def read_trace(path: Path) -> list[Arrival]:
    """JSON lines of ``at_s``, ``prompt_tokens``, ``output_tokens``, and perhaps ``prefix`` and
    ``prefix_tokens``, in any order: the traces of ``ridgeline bench serve``.

    Raises:
        InvalidRequestError: the file cannot be read, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequestError(f"The trace {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The trace {path} is not text in UTF-8.") from error
    found = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"{path}, line {number}: {error}") from error
        if line.at_s > _LATEST_S:
            raise InvalidRequestError(f"{path}, line {number}: at_s is in seconds.")
        if line.at_s < 0 or min(line.prompt_tokens, line.output_tokens) < 1:
            raise InvalidRequestError(f"{path}, line {number}: values must be positive.")
        if not 0 <= line.prefix_tokens <= line.prompt_tokens:
            raise InvalidRequestError(f"{path}, line {number}: a prefix is part of the prompt.")
        found.append(
            Arrival(
                arrival_s=line.at_s,
                prompt_tokens=line.prompt_tokens,
                output_tokens=line.output_tokens,
                prefix=line.prefix,
                prefix_tokens=line.prefix_tokens,
            )
        )
    if not found:
        raise InvalidRequestError(f"The trace {path} is empty.")
    return sorted(found, key=lambda arrival: arrival.arrival_s)
