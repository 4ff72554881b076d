"""SVG plots of a sweep."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.bench.serve.session import Point
from ridgeline.core.errors import DiskError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_plots(points: Sequence[Point], folder: Path, *, title: str) -> list[Path]:
    """Latency over throughput, TTFT over input length, and occupancy per step where known.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        DiskError: the folder cannot be written.
    """
    figures = {
        "latency-throughput": _latency_throughput(points),
        "ttft-input-length": _ttft_by_length(points[-1]),
    }
    if points[-1].steps:
        figures["occupancy"] = _occupancy(points[-1])
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.suptitle(title, fontsize=9)
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], format="svg")
    except OSError as error:
        raise DiskError(f"{folder} cannot be written: {error.strerror}.") from error
    return paths


def require_plots() -> None:
    """Raise `MissingDependencyError` where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("Plots need matplotlib, which is not installed.")


def _figure(*, rows: int = 1) -> "tuple[Figure, Any]":
    require_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _latency_throughput(points: Sequence[Point]) -> "Figure":
    figure, (ttft, tpot) = _figure(rows=2)
    for axes, name in ((ttft, "ttft_s"), (tpot, "tpot_s")):
        for share, style in (("p50", "o-"), ("p95", "s--")):
            known = [p for p in points if getattr(p.summary, name) is not None]
            x = [point.summary.output_tokens_s for point in known]
            quantiles = [getattr(getattr(point.summary, name), share) for point in known]
            axes.plot(x, [1e3 * each.value for each in quantiles], style, label=share)
        axes.set_ylabel(f"{name.removesuffix('_s').upper()}, ms")
        axes.set_xlabel("output tokens/s")
        axes.set_ylim(bottom=0)
        axes.legend()
    for point in points:
        if point.summary.ttft_s is not None:
            place = (point.summary.output_tokens_s, 1e3 * point.summary.ttft_s.p50.value)
            ttft.annotate(point.load.label, place, fontsize=6)
    return figure


def _ttft_by_length(point: Point) -> "Figure":
    figure, (axes,) = _figure()
    done = [trace for trace in point.traces if trace.is_complete]
    lengths = [trace.num_prompt_tokens for trace in done]
    axes.scatter(lengths, [1e3 * trace.ttft_s for trace in done], s=6)
    axes.set_xlabel("input tokens")
    axes.set_ylabel("TTFT, ms")
    axes.set_title(point.load.label, fontsize=8)
    return figure


def _occupancy(point: Point) -> "Figure":
    figure, (sequences, tokens) = _figure(rows=2)
    first_s = point.steps[0].finished_s
    times = [step.finished_s - first_s for step in point.steps]
    sequences.step(times, [step.num_sequences for step in point.steps], linewidth=0.7)
    sequences.set_ylabel("sequences in step")
    tokens.step(times, [step.num_tokens for step in point.steps], linewidth=0.7)
    tokens.set_ylabel("tokens in step")
    tokens.set_xlabel("seconds")
    return figure
