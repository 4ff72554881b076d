"""The roofline drawn: in characters for a terminal, and as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path

from ridgeline.core.errors import MissingDependencyError
from ridgeline.roofline.explain import Point

_MARKS = {"decode": "o", "prefill": "#"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A machine's bytes and FLOPs per second, and where they are from."""

    label: str
    bytes_per_s: float
    peak: float


def draw_text(
    points: Sequence[Point],
    machine: Roof,
    beside: Roof | None = None,
    *,
    width: int = 72,
    height: int = 18,
) -> str:
    """FLOP/s over FLOPs per byte, both logarithmic; ``/`` and ``-`` are the roof.

    The roof ``beside`` it is drawn with dots.
    """
    xs = [point.intensity for point in points] + [machine.peak / machine.bytes_per_s]
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
    return "\n".join([*lines, legend if beside is None else f"{legend}, . {beside.label}"])


def draw_svg(
    points: Sequence[Point],
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
        import matplotlib as mpl

        mpl.use("svg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError("Drawing needs matplotlib: pip install matplotlib.") from error
    figure, axes = pyplot.subplots(figsize=(8, 5))
    xs = [point.intensity for point in points]
    left, right = min(xs) / 2, max([*xs, machine.peak / machine.bytes_per_s]) * 4
    for roof, style in ((machine, "k-"), (beside, "k:")):
        if roof is not None:
            heights = [left * roof.bytes_per_s, roof.peak, roof.peak]
            axes.plot([left, roof.peak / roof.bytes_per_s, right], heights, style, label=roof.label)
    for phase, mark, colour in (("decode", "o", "tab:blue"), ("prefill", "s", "tab:red")):
        chosen = [point for point in points if point.phase == phase]
        if not chosen:
            continue
        middle = [point.flops_per_s for point in chosen]
        slow = [p.flops_per_s * (1 - p.seconds / p.high_s) for p in chosen]
        fast = [p.flops_per_s * (p.seconds / p.low_s - 1) for p in chosen]
        axes.errorbar(
            [point.intensity for point in chosen],
            middle,
            yerr=[[max(0.0, v) for v in slow], [max(0.0, v) for v in fast]],
            fmt=mark,
            color=colour,
            label=phase,
        )
        for point in chosen:
            label = point.name.removeprefix(f"{phase} ")
            axes.annotate(label, (point.intensity, point.flops_per_s), fontsize=6)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s", title=title)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, format="svg")
    pyplot.close(figure)
