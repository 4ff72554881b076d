"""The roofline drawn: in characters for a terminal, and as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.bench.plot_labels import POINTS_PER_INCH, place_labels
from ridgeline.core.errors import MissingDependencyError
from ridgeline.roofline.explain import RooflinePoint
from ridgeline.roofline.predict import is_known

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = {"decode": "o", "prefill": "#"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A machine's bytes and FLOPs per second, and where they are from.

    ``ridges``: FLOPs per byte at which arithmetic begins to bind, by the level of memory that the
    data lies in.
    """

    label: str
    bytes_per_s: float
    peak: float
    ridges: Mapping[str, float] = field(default_factory=dict)


def draw_text(
    points: Sequence[RooflinePoint],
    machine: Roof,
    beside: Roof | None = None,
    *,
    width: int = 72,
    height: int = 18,
) -> str:
    """FLOP/s over FLOPs per byte, both logarithmic; ``/`` and ``-`` are the roof, on which a letter
    stands at the ridge of each level of memory.

    The roof ``beside`` it is drawn with dots.
    """
    xs = [point.intensity for point in points] + [machine.peak / machine.bytes_per_s]
    xs += machine.ridges.values()
    ys = [point.flops_per_s for point in points] + [machine.peak]
    if beside is not None:
        ys.append(beside.peak)
    low_x, high_x = floor(log10(min(xs))), ceil(log10(max(xs)) + 0.3)
    low_y, high_y = floor(log10(min(ys))), ceil(log10(max(ys)) + 0.02)
    grid = [[" "] * width for _ in range(height)]

    def cell(x: float, y: float) -> tuple[int, int]:
        column = round((log10(x) - low_x) / (high_x - low_x) * (width - 1))
        row = round((high_y - log10(y)) / (high_y - low_y) * (height - 1))
        return min(max(row, 0), height - 1), min(max(column, 0), width - 1)

    def draw(roof: Roof, slope: str, flat: str) -> None:
        for column in range(width):
            x = 10 ** (low_x + column / (width - 1) * (high_x - low_x))
            y = min(roof.peak, x * roof.bytes_per_s)
            if log10(y) >= low_y:
                row, _ = cell(x, y)
                grid[row][column] = flat if y == roof.peak else slope

    if beside is not None:
        draw(beside, ".", ".")
    draw(machine, "/", "-")
    marks = {name: name[-1] if name[-1].isdigit() else name[0] for name in machine.ridges}
    for name, ridge in machine.ridges.items():
        row, column = cell(ridge, machine.peak)
        grid[row][column] = marks[name]
    for point in points:
        row, column = cell(point.intensity, point.flops_per_s)
        grid[row][column] = _MARKS[point.phase]
    labels = {cell(10.0**low_x, 10.0**each)[0]: f"1e{each}" for each in range(low_y, high_y + 1)}
    lines = [
        f"{labels.get(row, ''):>5} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)
    ]
    lines.append(" " * 6 + "+" + "-" * width)
    ends = f"1e{low_x}", f"1e{high_x} FLOPs/byte"
    lines.append(" " * 7 + ends[0] + ends[1].rjust(width - len(ends[0])))
    legend = f"       FLOP/s; o decode, # prefill (predicted), / - {machine.label}"
    lines.append(legend if beside is None else f"{legend},\n       . {beside.label}")
    if machine.ridges:
        ridges = (f"{marks[name]} {name} {ridge:.3g}" for name, ridge in machine.ridges.items())
        lines.append(f"       ridges in FLOPs/byte, by where the data lies: {', '.join(ridges)}")
    return "\n".join(lines)


def draw_svg(
    points: Sequence[RooflinePoint],
    path: Path,
    machine: Roof,
    beside: Roof | None = None,
    *,
    title: str,
) -> None:
    """Write the drawing to a file, with the intervals of the predictions as bars.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("Drawing needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(8, 5.5), dpi=POINTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    xs = [point.intensity for point in points]
    left = min([*xs, *machine.ridges.values()]) / 2
    right = max([*xs, machine.peak / machine.bytes_per_s]) * 4
    lines = [
        _draw_roof(axes, roof, left, right, color=colour, linestyle=style)
        for roof, colour, style in ((machine, "black", "-"), (beside, "0.5", "--"))
        if roof is not None
    ]
    for phase, mark, colour in (("decode", "o", "tab:blue"), ("prefill", "s", "tab:red")):
        chosen = [point for point in points if point.phase == phase]
        if chosen:
            lines += _draw_points(axes, chosen, phase, fmt=mark, color=colour)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s", title=title)
    axes.set_xlim(left, right)
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    named = [
        (point.name.removeprefix(f"{point.phase} "), (point.intensity, point.flops_per_s))
        for point in points
    ]
    place_labels(figure, axes, named, lines=lines)
    figure.savefig(path, format="svg")


def _draw_roof(
    axes: "Axes", roof: Roof, left: float, right: float, *, color: str, linestyle: str
) -> list[tuple[float, float]]:
    """Draw a machine's roof from ``left`` to ``right`` and the slopes of its nearer levels; the
    roof's corners."""
    ridge = roof.peak / roof.bytes_per_s
    corners = [(left, left * roof.bytes_per_s), (ridge, roof.peak), (right, roof.peak)]
    label = f"{roof.label}, ridge at {ridge:.1f} FLOPs/byte"
    axes.plot(*zip(*corners, strict=True), color=color, linestyle=linestyle, label=label)
    axes.plot(ridge, roof.peak, "^", color=color, markersize=7)
    axes.axvline(ridge, color=color, linestyle=":", linewidth=0.7)
    for number, (name, near) in enumerate(_nearer(roof)):
        slope = left, min(near, right)
        axes.plot(
            slope,
            [each * roof.peak / near for each in slope],
            color=color,
            linestyle=(0, (1, 2 + 2 * number)),
            linewidth=0.9,
            label=f"{name}, ridge at {near:.3g}",
        )
        axes.plot(near, roof.peak, "^", color=color, markersize=4)
    return corners


def _draw_points(
    axes: "Axes", points: Sequence[RooflinePoint], phase: str, *, fmt: str, color: str
) -> list[list[tuple[float, float]]]:
    """Draw the steps of a phase; the ends of each one's bar."""
    middle = [point.flops_per_s for point in points]
    slowest = [p.flops_per_s * p.seconds / p.high_s for p in points]
    fastest = [p.flops_per_s * p.seconds / p.low_s for p in points]
    known = [is_known(p.low_s, p.high_s) for p in points]
    below = [max(0.0, m - v) * k for m, v, k in zip(middle, slowest, known, strict=True)]
    above = [max(0.0, v - m) * k for m, v, k in zip(middle, fastest, known, strict=True)]
    axes.errorbar(
        [point.intensity for point in points],
        middle,
        yerr=[below, above],
        fmt=fmt,
        markersize=5,
        color=color,
        label=f"{phase}, 80% interval" if all(known) else f"{phase}, error unknown",
    )
    return [
        [(point.intensity, point.flops_per_s - low), (point.intensity, point.flops_per_s + high)]
        for point, low, high in zip(points, below, above, strict=True)
    ]


def _nearer(roof: Roof) -> list[tuple[str, float]]:
    """The ridges of the levels before main memory, whose own is that of the roof."""
    far = roof.peak / roof.bytes_per_s
    return [(name, ridge) for name, ridge in roof.ridges.items() if ridge < 0.99 * far]
