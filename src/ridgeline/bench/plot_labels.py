"""Labels of a plot: inside its axes, and apart from what is drawn there and from each other."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_PER_INCH = 72  # the resolution of figures with labels: a pixel is a point
_GAP, _STEP, _FARTHEST = 5.0, 6.0, 400.0  # points from the marker
_DIRECTIONS = 16
_LEADER = 14.0  # from here on a line says whose label it is
_MARKER = 4.0  # half the side of one

Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top


def place_labels(
    figure: "Figure",
    axes: "Axes",
    labels: Sequence[tuple[str, Place]],
    *,
    lines: Sequence[Sequence[Place]] = (),
    size: float = 7,
) -> list[Any]:
    """Write each label as near to its place (in data) as it has room; call this last.

    ``lines`` are polygons through data that labels keep off as well. A label that has room nowhere
    is left out. Returns the texts. ``figure`` has `POINTS_PER_INCH` dots per inch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    figure.draw_without_rendering()  # limits and layout are final from here on
    to_points = axes.transData.transform
    frame: Box = axes.bbox.extents
    taken = [_around(tuple(to_points(place)), _MARKER, _MARKER) for _, place in labels]
    for line in lines:
        taken += [_around(at, 1.0, 1.0) for at in _along([tuple(to_points(p)) for p in line])]
    texts = []
    for label, place in labels:
        text = axes.annotate(
            label,
            place,
            (0, 0),
            textcoords="offset points",
            fontsize=size,
            ha="center",
            va="center",
        )
        extent = text.get_window_extent(renderer)
        half = extent.width / 2 + 1, extent.height / 2 + 1
        at = tuple(to_points(place))
        for dx, dy in _offsets(*half):
            box = _around((at[0] + dx, at[1] + dy), *half)
            if _within(box, frame) and not any(_overlap(box, other) for other in taken):
                break
        else:
            text.remove()
            continue
        taken.append(box)
        text.set_position((dx, dy))
        end = _nearest(dx, half[0]), _nearest(dy, half[1])
        if hypot(*end) > _LEADER:
            leader = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.5"}
            axes.annotate("", place, end, textcoords="offset points", arrowprops=leader)
        texts.append(text)
    return texts


def _nearest(middle: float, half: float) -> float:
    """Of a label's side, what is nearest to its marker at 0."""
    return max(0.0, middle - half) + min(0.0, middle + half)


def _offsets(half_width: float, half_height: float) -> Iterator[Place]:
    """From the marker to the middle of a label: farther and farther, all around, right first."""
    distance = _GAP
    while distance < _FARTHEST:
        for number in range(_DIRECTIONS):
            angle = 2 * pi * number / _DIRECTIONS
            yield (half_width + distance) * cos(angle), (half_height + distance) * sin(angle)
        distance += _STEP


def _along(corners: Sequence[Place]) -> Iterator[Place]:
    """Places on a line, two points from each other."""
    for (x, y), (to_x, to_y) in pairwise(corners):
        count = int(hypot(to_x - x, to_y - y) / 2) + 1
        for number in range(count + 1):
            share = number / count
            yield x + share * (to_x - x), y + share * (to_y - y)


def _around(middle: Place, half_width: float, half_height: float) -> Box:
    x, y = middle
    return x - half_width, y - half_height, x + half_width, y + half_height


def _within(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
