"""The report of ``ridgeline bench serve`` as one HTML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.report import Axes, Line, Mark, Page, Tile, plot

_LATENCIES = (
    ("time to first token, ms", "ttft_s"),
    ("time from token to token, ms", "tpot_s"),
    ("end to end, ms", "end_to_end_s"),
)


def page(report: Mapping[str, Any]) -> str:
    """Of what ``--json`` prints."""
    points: Sequence[Mapping[str, Any]] = report["points"]
    best = max(points, key=lambda point: point["goodput"])
    has_slo = any(best["slo"].values())
    shown = Page(
        title=f"{report['model']} under load",
        subtitle="ridgeline bench serve; a request starts when it was scheduled to be sent",
        verdict=_verdict(best, has_slo=has_slo, is_sweep=len(points) > 1),
        data=report,
    )
    shown.add_tiles(_tiles(best, has_slo=has_slo))
    shown.add_heading(
        "Latency against throughput",
        "Each point is a load; up is slower, right is more. The median, and what 95 % stay below.",
    )
    shown.add_figures(*((label, _latency(points, label, name)) for label, name in _LATENCIES))
    shown.add_heading("All loads")
    shown.add_table(
        ("load", "good/s", "good", "output tok/s", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms",
         "TPOT p95 ms", "cached", "failed"),
        [_row(point) for point in points],
    )  # fmt: skip
    return shown.to_html()


def _verdict(best: Mapping[str, Any], *, has_slo: bool, is_sweep: bool) -> str:
    most = "At most " if is_sweep else ""
    if not has_slo:
        return (
            f"{most}{best['completed_rate']:.3g} requests a second are answered, "
            f"{best['output_tokens_s']:,.0f} output tokens a second."
        )
    return (
        f"{most}{best['goodput']:.3g} requests a second are answered within the limits, at "
        f"{_load(best['load'])}: {best['good_share']:.0%} of what came."
    )


def _tiles(best: Mapping[str, Any], *, has_slo: bool) -> list[Tile]:
    tiles = [
        Tile(name="output", value=f"{best['output_tokens_s']:,.0f} tok/s", note=_load(best["load"]))
    ]
    if has_slo:
        limits = ", ".join(
            f"{name.removesuffix('_s').upper()} {1e3 * limit:g} ms"
            for name, limit in best["slo"].items()
            if limit
        )
        tiles.insert(0, Tile(name="goodput", value=f"{best['goodput']:.3g}/s", note=limits))
    for label, name in (("first token, median", "ttft_s"), ("a token, median", "tpot_s")):
        if best[name] is not None:
            p50, p95 = (1e3 * best[name][share]["value"] for share in ("p50", "p95"))
            tiles.append(Tile(name=label, value=f"{p50:,.3g} ms", note=f"95 %: {p95:,.3g} ms"))
    usd = best["cost"].get("usd_per_1m_output")
    if usd is not None:
        tiles.append(Tile(name="1M output tokens", value=f"${usd:.3g}"))
    return tiles


def _latency(points: Sequence[Mapping[str, Any]], label: str, name: str) -> str:
    known = [point for point in points if point[name] is not None]
    lines, marks = [], []
    for share, tone in (("p50", "a"), ("p95", "b")):
        places = [(each["output_tokens_s"], 1e3 * each[name][share]["value"]) for each in known]
        if len(places) > 1:
            lines.append(Line(points=places, label=share, tone=tone))
        marks += [
            Mark(
                x=x,
                y=y,
                tone=tone,
                label=_load(point["load"]) if share == "p50" else "",
                title=f"{_load(point['load'])}: {share} {y:,.3g} ms",
            )
            for (x, y), point in zip(places, known, strict=True)
        ]
    axes = Axes(x="output tokens/s", y="ms", zero_y=True)
    return plot(axes, marks=marks, lines=lines, title=label)


def _row(point: Mapping[str, Any]) -> tuple[str, ...]:
    def cell(name: str, share: str) -> str:
        return "" if point[name] is None else f"{1e3 * point[name][share]['value']:,.3g}"

    return (
        _load(point["load"]),
        f"{point['goodput']:.3g}",
        f"{point['good_share']:.0%}",
        f"{point['output_tokens_s']:,.0f}",
        *(cell(name, share) for name in ("ttft_s", "tpot_s") for share in ("p50", "p95")),
        f"{point['cached_share']:.0%}",
        str(point["num_failed"] or ""),
    )


def _load(load: Mapping[str, Any]) -> str:
    if load["rate"] is not None:
        return f"{load['rate']:g}/s"
    return "the trace" if load["concurrency"] is None else f"{load['concurrency']} at once"
