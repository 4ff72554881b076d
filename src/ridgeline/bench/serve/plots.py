"""SVG plots of a sweep."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.bench.plot_labels import POINTS_PER_INCH, place_labels
from ridgeline.bench.serve.session import LoadPoint
from ridgeline.core.errors import DiskError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_plots(points: Sequence[LoadPoint], folder: Path, *, title: str) -> list[Path]:
    """Latency over throughput, TTFT over input length, and occupancy per step where known.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        DiskError: the folder cannot be written.
    """
    figures = {
        "latency-throughput": _latency_throughput(points, title),
        "ttft-input-length": _ttft_by_length(points, title),
    }
    if any(point.steps for point in points):
        figures["occupancy"] = _occupancy(points, title)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], format="svg")
    except OSError as error:
        raise DiskError(f"{folder} cannot be written: {error.strerror}.") from error
    return paths


def require_plots() -> None:
    """Raise `MissingDependencyError` where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("Plots need matplotlib, which is not installed.")


def _figure(title: str, *, rows: int = 1) -> "tuple[Figure, Any]":
    require_plots()
    from matplotlib.figure import Figure

    size = (7.2, 0.6 + 3.2 * rows)
    figure = Figure(figsize=size, dpi=POINTS_PER_INCH, layout="constrained")
    figure.suptitle(title, fontsize=9)
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _latency_throughput(points: Sequence[LoadPoint], title: str) -> "Figure":
    figure, panels = _figure(title, rows=2)
    named = []
    for axes, name in zip(panels, ("ttft_s", "tpot_s"), strict=True):
        known = [p for p in points if getattr(p.summary, name) is not None]
        x = [point.summary.output_tokens_s for point in known]
        lines = []
        for share, style in (("p50", "o-"), ("p95", "s--")):
            quantiles = [getattr(getattr(point.summary, name), share) for point in known]
            y = [1e3 * each.value for each in quantiles]
            axes.plot(x, y, style, markersize=4, label=share)
            lines.append(list(zip(x, y, strict=True)))
        axes.set_ylabel(f"{name.removesuffix('_s').upper()}, ms")
        axes.set_xlabel("output tokens/s")
        axes.set_ylim(bottom=0)
        named.append((axes, [p.load.label for p in known], lines))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    for axes, labels, lines in named:
        if labels:
            place_labels(figure, axes, list(zip(labels, lines[0], strict=True)), lines=lines)
    return figure


def _ttft_by_length(points: Sequence[LoadPoint], title: str) -> "Figure":
    figure, (axes,) = _figure(title)
    for point in points:
        done = [trace for trace in point.traces if trace.is_complete]
        lengths = [trace.num_prompt_tokens for trace in done]
        axes.scatter(lengths, [1e3 * trace.ttft_s for trace in done], s=6, label=point.load.label)
    axes.set_xlabel("input tokens")
    axes.set_ylabel("TTFT, ms")
    figure.legend(loc="outside right upper", title="load", fontsize=8)
    return figure


def _occupancy(points: Sequence[LoadPoint], title: str) -> "Figure":
    figure, (sequences, tokens) = _figure(title, rows=2)
    for point in points:
        if not point.steps:
            continue
        first_s = point.steps[0].finished_s
        times = [step.finished_s - first_s for step in point.steps]
        counts = [step.num_sequences for step in point.steps]
        sequences.step(times, counts, linewidth=0.7, label=point.load.label)
        tokens.step(times, [step.num_tokens for step in point.steps], linewidth=0.7)
    sequences.set_ylabel("sequences in step")
    tokens.set_ylabel("tokens in step")
    tokens.set_xlabel("seconds")
    figure.legend(loc="outside right upper", title="load", fontsize=8)
    return figure
