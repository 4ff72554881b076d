"""Charts as inline SVG, which needs no script: colours come from the page's style.

Drawings are 420 units wide, so that their letters can be read on a phone of 390 pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from ridgeline.report.scales import (
    Linear,
    Logarithmic,
    Scale,
    around,
    around_logs,
    short,
)

WIDTH, HEIGHT = 420, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 44
_ROW, _BAR = 46, 16
_LABEL_CHARS = 7.8  # units that a letter takes, in a wide font


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point; ``tone`` is a class of the style: a, b, c or quiet. ``bar`` is an interval of y."""

    x: float
    y: float
    tone: str = "quiet"
    label: str = ""
    title: str = ""
    bar: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points that are joined."""

    points: Sequence[tuple[float, float]]
    label: str = ""
    tone: str = "a"
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of `waterfall`: from one value to another, perhaps with an interval of its end."""

    label: str
    begin: float
    end: float
    text: str
    tone: str = "a"
    interval: tuple[float, float] | None = None
    beside: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the axes say, and whether they are logarithmic, begin at 0 or have equal bounds."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    zero_x: bool = False
    zero_y: bool = False
    square: bool = False
    extra_y: Sequence[float] = field(default=())


def plot(axes: Axes, *, marks: Sequence[Mark] = (), lines: Sequence[Line] = (), title: str) -> str:
    """Points and lines."""
    xs = [mark.x for mark in marks] + [x for line in lines for x, _ in line.points]
    ys = [mark.y for mark in marks] + [y for line in lines for _, y in line.points]
    ys += [end for mark in marks if mark.bar for end in mark.bar] + list(axes.extra_y)
    if not xs:
        return ""
    if axes.square:
        xs = ys = [*xs, *ys]
    x = _scale(xs, _LEFT, WIDTH - _RIGHT, is_log=axes.log_x, zero=axes.zero_x)
    y = _scale(ys, HEIGHT - _BOTTOM, _TOP, is_log=axes.log_y, zero=axes.zero_y)
    parts = [_grid(axes, x, y)]
    for line in lines:
        places = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in line.points)
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(f'<polyline class="line {line.tone}"{dashes} points="{places}"/>')
    parts += [_mark(mark, x, y) for mark in marks]
    parts.append(_mark_labels(marks, x, y))
    legend = [(line.label, line.tone, line.is_dashed) for line in lines if line.label]
    return _svg("".join(parts), HEIGHT, title) + _legend(legend)


def waterfall(bars: Sequence[Bar], *, unit: str, title: str) -> str:
    """Rows from above to below: each label stands over its bar."""
    ends = [end for bar in bars for end in (bar.begin, bar.end, *(bar.interval or ()))]
    low, high = around([*ends, 0.0], zero=True)
    x = Linear(low, high * 1.16, 8, WIDTH - 8)
    height = _ROW * len(bars) + 40
    parts = []
    for number, bar in enumerate(bars):
        top = _ROW * number + 22
        left, right = sorted((x.place(bar.begin), x.place(bar.end)))
        parts.append(f'<text class="name" x="8" y="{top - 6}">{escape(bar.label)}</text>')
        width = max(1.0, right - left)
        parts.append(
            f'<rect class="fill {bar.tone}" x="{left:.1f}" y="{top}" rx="2" '
            f'width="{width:.1f}" height="{_BAR}"/>'
        )
        if bar.beside is not None:
            at = x.place(bar.beside)
            right = max(right, at)
            parts.append(f'<path class="line quiet" d="M{at:.1f} {top - 3}v{_BAR + 6}"/>')
        if bar.interval is not None:
            one, other = (x.place(each) for each in bar.interval)
            middle = top + _BAR / 2
            parts.append(
                f'<path class="line ink" d="M{one:.1f} {middle}H{other:.1f}'
                f'M{one:.1f} {middle - 4}v8M{other:.1f} {middle - 4}v8"/>'
            )
            right = max(right, other)
        is_right = right + _LABEL_CHARS * len(bar.text) + 6 > WIDTH
        place = f'x="{WIDTH - 8}" y="{top - 6}" text-anchor="end"'
        parts.append(
            f'<text class="value" {place}>{escape(bar.text)}</text>'
            if is_right
            else f'<text class="value" x="{right + 6:.1f}" y="{top + 12}">{escape(bar.text)}</text>'
        )
    parts.append(f'<text class="axis" x="8" y="{height - 8}">{escape(unit)}</text>')
    return _svg("".join(parts), height, title)


def cdf(series: Sequence[tuple[str, Sequence[float], str]], *, x: str, limit: float | None) -> str:
    """Shares of requests over seconds: (label, values at equal shares, tone) each; ``limit`` is a
    line upright."""
    lines = [
        Line(
            points=[
                (value, 100 * number / (len(values) - 1)) for number, value in enumerate(values)
            ],
            label=label,
            tone=tone,
        )
        for label, values, tone in series
        if len(values) > 1
    ]
    if limit is not None and lines:
        lines.append(
            Line(points=[(limit, 0), (limit, 100)], label="limit", tone="quiet", is_dashed=True)
        )
    return plot(Axes(x=x, y="% of requests", zero_x=True, zero_y=True), lines=lines, title=x)


def _scale(values: Sequence[float], begin: float, end: float, *, is_log: bool, zero: bool) -> Scale:
    if is_log:
        return Logarithmic(*around_logs(values), begin, end)
    return Linear(*around(values, zero=zero), begin, end)


def _grid(axes: Axes, x: Scale, y: Scale) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<path class="frame" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>']
    for tick in x.ticks():
        at = x.place(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{short(tick)}</text>"
        )
    for tick in y.ticks():
        at = y.place(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
            f"{short(tick)}</text>"
        )
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="axis" x="{right}" y="{HEIGHT - 8}" text-anchor="end">{escape(axes.x)}</text>'
        f'<text class="axis" transform="translate(12 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(axes.y)}</text>'
    )
    return "".join(parts)


def _mark(mark: Mark, x: Scale, y: Scale) -> str:
    at_x, at_y = x.place(mark.x), y.place(mark.y)
    bar = ""
    if mark.bar is not None:
        low, high = (y.place(each) for each in mark.bar)
        bar = f'<path class="line {mark.tone}" d="M{at_x:.1f} {low:.1f}V{high:.1f}"/>'
    tip = f"<title>{escape(mark.title or mark.label)}</title>"
    return (
        f'{bar}<circle class="dot {mark.tone}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="5">{tip}</circle>'
    )


def _mark_labels(marks: Sequence[Mark], x: Scale, y: Scale) -> str:
    """Beside their points, towards the middle; one that would lie on another moves below it."""
    parts, taken = [], list[tuple[float, float, float]]()
    for mark in sorted((each for each in marks if each.label), key=lambda each: y.place(each.y)):
        at_x, at_y = x.place(mark.x), y.place(mark.y) + 4
        wide = _LABEL_CHARS * len(mark.label)
        is_left = at_x + 9 + wide > WIDTH
        begin = max(2.0, at_x - 9 - wide) if is_left else at_x + 9
        place = f'x="{at_x - 9:.1f}" text-anchor="end"' if is_left else f'x="{begin:.1f}"'
        while any(begin < e and b < begin + wide and abs(at_y - t) < 13 for b, e, t in taken):
            at_y += 13
        taken.append((begin, begin + wide, at_y))
        parts.append(f'<text class="name" {place} y="{at_y:.1f}">{escape(mark.label)}</text>')
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    if not entries:
        return ""
    items = "".join(
        f'<span class="key {tone}{" dashed" if dashed else ""}">{escape(label)}</span>'
        for label, tone, dashed in entries
    )
    return f'<p class="legend">{items}</p>'


def _svg(content: str, height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{content}</svg>"
    )
