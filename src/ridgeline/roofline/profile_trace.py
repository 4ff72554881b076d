"""Recorded steps as a Chrome trace, which Perfetto and chrome://tracing open, and as an SVG bar."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ridgeline.core.recorded_step import OpSpan, RecordedStep
from ridgeline.roofline.profile import Profile

_STEPS, _OPS, _FIRST_THREAD = 0, 1, 2  # tracks
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_WORK, _WAIT, _SERIAL, _HOST, _GAP = "#59a14f", "#e15759", "#edc948", "#bab0ac", "#d7d7d7"
_WIDTH, _ROW, _LETTER = 1000, 28, 7


def chrome_trace(steps: Sequence[RecordedStep], *, title: str) -> dict[str, Any]:
    """The trace as plain values: tracks of steps, of ops, and of each thread's tiles."""
    begin_s = steps[0].begin_s if steps else 0.0

    def event(track: int, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        return {
            "ph": "X",
            "pid": 1,
            "tid": track,
            "name": name,
            "ts": (begin - begin_s) * 1e6,
            "dur": max(0.0, end - begin) * 1e6,
            "args": args,
        }

    events, threads = [], set[int]()
    for step in steps:
        tokens = step.plan.num_tokens
        name = f"step {step.plan.step_id}"
        events.append(event(_STEPS, name, step.begin_s, step.end_s, tokens=tokens))
        for a_pass in step.passes:
            for span in a_pass.spans:
                args = {"role": str(a_pass.role), "ops": list(span.ops)}
                events.append(event(_OPS, span.name, span.begin_s, span.end_s, **args))
                for share_name, share in _shares(span):
                    threads.add(share.thread)
                    busy = {"tiles": share.num_tiles, "busy_us": share.busy_s * 1e6}
                    track = _FIRST_THREAD + share.thread
                    events.append(event(track, share_name, share.begin_s, share.end_s, **busy))
    names = {_STEPS: "steps", _OPS: "ops"} | {
        _FIRST_THREAD + thread: f"thread {thread}" for thread in sorted(threads)
    }
    return {
        "traceEvents": [_named("process_name", 0, title)]
        + [_named("thread_name", track, name) for track, name in names.items()]
        + events,
        "displayTimeUnit": "ns",
    }


def _shares(span: OpSpan) -> Iterator[tuple[str, Any]]:
    for number, job in enumerate(span.jobs):
        for share in job.shares:
            yield f"{span.name} {number}" if len(span.jobs) > 1 else span.name, share


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": kind, "args": {"name": name}}


def flame_svg(profile: Profile, *, title: str) -> str:
    """A mean step as a bar of its ops, and below each of them what its threads did."""
    parts = [
        (row.name, row.seconds, _COLOURS[number % len(_COLOURS)], row)
        for number, row in enumerate(profile.rows)
    ] + [("host", profile.host_s, _HOST, None), ("between steps", profile.gap_s, _GAP, None)]
    scale = _WIDTH / max(profile.sum_s, 1e-12)
    drawn = [_box(0, 1, _WIDTH, "#ffffff", title, f"{title}: {profile.seconds * 1e3:.3f} ms")]
    at = 0.0
    for name, seconds, colour, row in parts:
        width = seconds * scale
        label = f"{name}: {seconds * 1e3:.3f} ms, {seconds / profile.seconds:.1%}"
        drawn.append(_box(at, 2, width, colour, name, label))
        inner = at
        for kind, amount, shade in (
            ()
            if row is None
            else (
                ("work", row.work_s, _WORK),
                ("wait", row.wait_s, _WAIT),
                ("serial", row.serial_s, _SERIAL),
            )
        ):
            text = f"{name}, {kind}: {amount * 1e3:.3f} ms"
            drawn.append(_box(inner, 3, amount * scale, shade, kind, text))
            inner += amount * scale
        at += width
    height = 4 * _ROW + _ROW // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">\n'
        + "\n".join(filter(None, drawn))
        + "\n</svg>\n"
    )


def _box(x: float, row: int, width: float, colour: str, text: str, title: str) -> str:
    """A rectangle that says what it is when it is pointed at; its text where that has room."""
    if width < 0.05:
        return ""
    y = (row - 1) * _ROW + 4
    label = ""
    if len(text) * _LETTER < width:
        label = f'<text x="{x + 3:.2f}" y="{y + 17}">{escape(text)}</text>'
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW - 3}" fill="{colour}" stroke="#ffffff" stroke-width="0.5"/>{label}</g>'
    )
