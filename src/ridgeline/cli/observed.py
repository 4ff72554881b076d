"""What a server has seen, fetched from ``/admin/traffic`` for `tune` and `optimize`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ridgeline.core.errors import InvalidRequestError, NetworkError
from ridgeline.planning import Arrival

_FEWEST = 16


class _Line(msgspec.Struct):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class _Report(msgspec.Struct):
    settings: dict[str, Any]
    requests: list[_Line]
    alarms: list[dict[str, Any]]
    measured_over_predicted: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraffic:
    """Settings of a server's engine that are not the defaults, its latest requests, and where they
    changed (`ridgeline.server.drift.Alarm` in plain values).

    ``level`` is measured over predicted seconds of its decode steps, or else of prefill.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    arrivals: Sequence[Arrival] = ()
    cached_tokens: int = 0
    level: float = 1.0
    alarms: Sequence[Mapping[str, Any]] = ()


def observed_traffic(url: str, api_key: str | None) -> ObservedTraffic:
    """What the server at ``url`` has seen.

    Requests that found as much of their prompt in the prefix cache are taken to share a prefix.

    Raises:
        NetworkError: it does not answer, refuses the key, or is no server of Ridgeline's.
        InvalidRequestError: it has seen too little to go by.
    """
    from ridgeline.bench.serve.http_target import HttpTarget

    answer = asyncio.run(HttpTarget(url, model="", api_key=api_key).get("/admin/traffic"))
    try:
        report = msgspec.json.decode(answer, type=_Report)
    except msgspec.DecodeError as error:
        raise NetworkError(f"{url} does not tell what it has seen: {error}") from error
    if len(report.requests) < _FEWEST:
        raise InvalidRequestError(
            f"The server has seen {len(report.requests)} requests, too few to go by; "
            f"{_FEWEST} are the least."
        )
    arrivals = [
        Arrival(
            arrival_s=each.at_s,
            prompt_tokens=each.prompt_tokens,
            output_tokens=each.output_tokens,
            prefix=f"of {each.cached_tokens}" if each.cached_tokens else "",
            prefix_tokens=each.cached_tokens,
        )
        for each in report.requests
    ]
    return ObservedTraffic(
        settings=report.settings,
        arrivals=arrivals,
        cached_tokens=sum(each.cached_tokens for each in report.requests),
        level=report.measured_over_predicted.get(
            "decode", report.measured_over_predicted.get("prefill", 1.0)
        ),
        alarms=report.alarms,
    )
