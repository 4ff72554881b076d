"""What `ridgeline bench serve` and `ridgeline probe` have in common: limits, prices, the report."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ridgeline.cli.display import figure, print_columns, with_interval
from ridgeline.cli.options import Parser, positive
from ridgeline.core.errors import InvalidRequestError
from ridgeline.roofline.metrics import MIN_P99_SAMPLES
from ridgeline.roofline.slo import SLO_NAMES, Slo, parse_slo

if TYPE_CHECKING:
    from ridgeline.bench.serve.costs import Prices

_RATES = (
    ("requests/s offered", "request_rate", "offered"),
    ("requests/s completed", "completed_rate", "completed"),
    ("requests/s good", "goodput", "good"),
)
_LATENCIES = (
    ("TTFT", "ttft_s", 1e3),
    ("time to publish", "time_to_publish_s", 1e3),
    ("TPOT", "tpot_s", 1e3),
    ("stall", "stall_s", 1e3),
    ("end to end", "end_to_end_s", 1e3),
    ("queue", "queue_s", 1e3),
    ("dispatch delay", "dispatch_delay_s", 1e3),
    ("tok/s of a user", "user_tokens_s", 1.0),
)
_PERCENTILES = ("p50", "p90", "p95", "p99")


def add_report_options(parser: Parser) -> None:
    """Limits of good requests, and prices."""
    slo = parser.add_argument_group("limits of good requests")
    slo.add_argument("--slo", metavar="S", help="seconds, ttft=0.2,tpot=0.12,e2e=10; or: chat")
    for name in SLO_NAMES:
        slo.add_argument(f"--{name}-slo", type=positive, metavar="MS", help="in milliseconds")
    prices = parser.add_argument_group("prices")
    prices.add_argument("--usd-per-hour", type=positive, metavar="USD", help="the whole machine")
    prices.add_argument("--usd-per-1m-input", type=positive, metavar="USD", help="tokens of an API")
    prices.add_argument("--usd-per-1m-output", type=positive, metavar="USD")


def slo_of(arguments: argparse.Namespace) -> Slo:
    """The limits; those in milliseconds come before those of ``--slo``.

    Raises:
        InvalidRequestError: ``--slo`` cannot be read.
    """
    slo = Slo() if arguments.slo is None else parse_slo(arguments.slo)
    given = {field: getattr(arguments, f"{name}_slo") for name, field in SLO_NAMES.items()}
    return replace(slo, **{field: ms / 1e3 for field, ms in given.items() if ms is not None})


def prices_of(arguments: argparse.Namespace) -> "Prices":
    """By the hour, or by tokens.

    Raises:
        InvalidRequestError: both are given, or one of the two prices of tokens.
    """
    from ridgeline.bench.serve.costs import Prices

    hour, per_input = arguments.usd_per_hour, arguments.usd_per_1m_input
    per_output = arguments.usd_per_1m_output
    if (per_input is None) != (per_output is None):
        raise InvalidRequestError("--usd-per-1m-input and --usd-per-1m-output go together.")
    if per_input is None:
        return Prices(usd_per_hour=hour)
    if hour is not None:
        raise InvalidRequestError("--usd-per-hour is of a machine, the others are of an API.")
    from ridgeline.planning.cost import TokenPrices  # torch takes a second: not for --help

    return Prices(tokens=TokenPrices(input=per_input, output=per_output))


def print_points(console: Console, name: str, points: Sequence[Mapping[str, Any]]) -> None:
    """A table with one column for each load, and under it what must be known to read it."""
    slo = Slo(**points[0]["slo"])
    limits = f"; good: {slo}" if slo.is_set else ""
    console.print(f"{name}: ms; a request starts when it was scheduled{limits}", markup=False)
    loads = [_label(point["load"]) for point in points]
    print_columns(console, ("", *loads), _rows(points, slo))
    _print_by_input(console, points)
    for point in points:
        energy = point["energy"]
        if energy["valid"]:
            console.print(
                f"{_label(point['load'])}: {energy['joules_per_output_token']:.3g} J for each "
                f"token of output ({energy['source']})"
            )
        for warning in _warnings(point):
            console.print(f"{_label(point['load'])}: {warning}", style="yellow", markup=False)
    if any(point["utilization"] and not _mbu(point, "decode") for point in points):
        console.print("MFU and MBU need this machine's ceilings: ridgeline roofline", style="dim")
    if not any(sample and sample["p99"] for p in points for sample in [p["ttft_s"]]):
        console.print(f"p99 of requests needs {MIN_P99_SAMPLES:,} of them", style="dim")


def _rows(points: Sequence[Mapping[str, Any]], slo: Slo) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []

    def add(label: str, *cells: str) -> None:
        rows.append((label, *cells))

    for label, key, rpm in _RATES if slo.is_set else _RATES[:2]:
        add(f"{label} (RPM)", *(_rate(point[key], point["rpm"][rpm]) for point in points))
    if slo.is_set:
        add("of all that came", *(f"{point['good_share']:.0%}" for point in points))
    for label, key in (("output tok/s", "output_tokens_s"), ("input tok/s", "input_tokens_s")):
        add(label, *(f"{point[key]:,.2f}" for point in points))
    if len(points) > 1:
        add("output, to the first", *_multiples([point["output_tokens_s"] for point in points]))
        medians = [point["tpot_s"]["p50"]["value"] if point["tpot_s"] else 0.0 for point in points]
        add("TPOT, to the first", *_multiples(medians))
    add("prompt tokens cached", *(f"{point['cached_share']:.0%}" for point in points))
    add("in progress, mean", *(f"{point['mean_concurrency']:,.2f}" for point in points))
    for label, key, scale in _LATENCIES:
        for share in _PERCENTILES:
            add(f"{label} {share}", *(_cell(point[key], share, scale) for point in points))
    for phase in ("prefill", "decode"):
        for name in ("mfu", "mbu"):
            found = [point["utilization"].get(phase, {}).get(name) for point in points]
            add(f"{phase} {name.upper()}", *(_share(value) for value in found))
    for label, what in (("processors busy", "processors"), ("GPUs busy (nvidia-smi)", "gpus")):
        add(label, *(_share(point["busy"][what]) for point in points))
    for label, key in (
        ("$ per 1M output", "usd_per_1m_output"),
        ("$ per 1K requests", "usd_per_1k_requests"),
        ("$ per 1K good", "usd_per_1k_good"),
    ):
        add(label, *(_usd(point["cost"].get(key)) for point in points))
    for kind in ("input", "output"):
        phases = [(point["cost"].get("usd_per_1m_by_phase") or {}).get(kind) for point in points]
        add(f"$ per 1M {kind}, by phase", *(_usd(value) for value in phases))
    return rows


def _print_by_input(console: Console, points: Sequence[Mapping[str, Any]]) -> None:
    """TTFT against input length, where lengths differ."""
    if all(len(point["ttft_by_input"]) < 2 for point in points):
        return
    header = ("", "input tokens", "requests", *(f"TTFT {share}" for share in _PERCENTILES[:3]))
    rows = []
    for point in points:
        for part in point["ttft_by_input"]:
            cells = (_cell(part["ttft_s"], share, 1e3) for share in _PERCENTILES[:3])
            lengths = f"{part['low']}–{part['high']}"
            rows.append((_label(point["load"]), lengths, str(part["ttft_s"]["count"]), *cells))
    print_columns(console, header, rows, labels=3)


def _rate(per_second: float | None, per_minute: float | None) -> str:
    """Blank in a closed loop, to which nothing is offered."""
    return "" if per_second is None else f"{per_second:,.2f} ({per_minute:,.0f})"


def _multiples(values: Sequence[float]) -> list[str]:
    return [f"{value / values[0]:.2f}×" if values[0] and value else "" for value in values]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _usd(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _mbu(point: Mapping[str, Any], phase: str) -> float | None:
    found = point["utilization"].get(phase)
    return None if found is None else found["mbu"]


def _cell(sample: Mapping[str, Any] | None, share: str, scale: float) -> str:
    """A percentile, and its 95% interval where the sample is small and is not that itself."""
    if sample is None or sample[share] is None:
        return ""
    low, value, high = (sample[share][name] for name in ("low", "value", "high"))
    is_range = (low, high) == (sample["minimum"], sample["maximum"])
    if sample["count"] >= MIN_P99_SAMPLES or is_range or None in (low, high):
        return figure(value * scale)
    return with_interval(value * scale, low * scale, high * scale)


def _label(load: Mapping[str, Any]) -> str:
    if load["rate"] is not None:
        return f"{load['rate']:g}/s"
    return "trace" if load["concurrency"] is None else f"{load['concurrency']} at once"


def _warnings(point: Mapping[str, Any]) -> list[str]:
    warnings = []
    if point["num_failed"]:
        reason = "" if point["first_error"] is None else f", the first so: {point['first_error']}"
        warnings.append(f"{point['num_failed']} of {point['num_requests']} requests failed{reason}")
    if point["num_single_token"]:
        warnings.append(f"{point['num_single_token']} requests of one token have no TPOT.")
    if point["num_unpublished"]:
        warnings.append(f"{point['num_unpublished']} answers have no text that a user sees.")
    law = point["littles_law"]
    if law is not None and abs(law["concurrency"] - law["expected"]) > 0.05 * law["concurrency"]:
        warnings.append(
            f"not a steady state: {law['concurrency']:.1f} requests in progress where Little's "
            f"law expects {law['expected']:.1f}."
        )
    for phase, use in point["utilization"].items():
        for name in ("mfu", "mbu"):
            if use[name] is not None and use[name] > 1:
                warnings.append(
                    f"{phase}: {name.upper()} is {use[name]:.0%} of the ceiling, which cannot be; "
                    "the ceilings are out of date (ridgeline roofline --calibrate)."
                )
    return warnings
