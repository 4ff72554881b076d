"""How commands show answers, and what they tell beside them, which goes to standard error."""

import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from ridgeline.core.request import FinishReason, RequestOutput, RequestTimings
from ridgeline.core.speculation_figures import SpeculationFigures
from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.predict import is_known

ProgressCallback = Callable[[int, int, str], None]

# Names of models are shown as they are: ":100:" is no picture.
error_console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

_LINE_PERIOD_S = 10.0
_PIPE_COLUMNS = 100


def output_console() -> Console:
    """Standard output: as wide as the terminal or as COLUMNS says, and 100 columns elsewhere."""
    is_pipe = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, emoji=False, width=_PIPE_COLUMNS if is_pipe else None)


def print_paragraph(console: Console, text: str, *, indent: int, style: str | None = None) -> None:
    """Print a text within the console's width; lines after the first start at ``indent``."""
    lines = textwrap.wrap(
        text,
        console.width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def print_columns(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], *, labels: int = 1
) -> None:
    """Print a table without wrapping: columns that have no room beside those before them come in
    further tables, each with the first ``labels`` columns; rows without a figure are left out."""
    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    start = labels
    while start < len(header):
        stop = start + 1
        while (
            stop < len(header)
            and sum(widths[:labels] + widths[start : stop + 1]) + 2 * (labels + stop - start)
            < console.width
        ):
            stop += 1
        shown = [*range(labels), *range(start, stop)]
        for row in (header, *(row for row in rows if any(row[start:stop]))):
            blanks = [" " * (widths[number] - cell_len(row[number])) for number in shown]
            cells = [
                row[number] + blank if number < labels else blank + row[number]
                for number, blank in zip(shown, blanks, strict=True)
            ]
            line, style = "  ".join(cells).rstrip(), "bold" if row is header else None
            console.print(line, style=style, markup=False, soft_wrap=True)
        start = stop


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """What is being done: on a terminal a line that is gone when it is, else one now and then."""
    if not sys.stderr.isatty():
        show = progress_lines()
        yield lambda label: show(0, 0, label)
        return
    with error_console.status(text) as shown:
        yield shown.update


def figure(value: float) -> str:
    """Three digits, or all of a whole number that has more."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def with_interval(value: float, low: float | None, high: float | None) -> str:
    """A figure and its interval, which is left out where it reads as the figure itself."""
    text = figure(value)
    if low is None or high is None or {figure(low), figure(high)} == {text}:
        return text
    return f"{text} ({figure(low)}–{figure(high)})"


def predicted_range(low: float, high: float, form: str) -> str:
    """Where a prediction may lie, in words and figures of a format."""
    return f"{low:{form}} to {high:{form}}" if is_known(low, high) else "error unknown"


@contextmanager
def loading_bar(*, of_bytes: bool = True) -> Iterator[ProgressCallback]:
    """Progress of loading and downloading, or of measuring, which is not ``of_bytes``: on a
    terminal a bar, gone when it is done; in a log or a pipe a line every ten seconds."""
    if not sys.stderr.isatty():
        yield progress_lines()
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (TaskProgressColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
    with Progress(*columns, console=error_console, transient=True) as bar:
        task = bar.add_task("loading")

        def update(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total or None, description=label[:32])

        yield update


@contextmanager
def resumable_run(out: Path) -> Iterator[ProgressCallback]:
    """A `loading_bar` of work whose finished parts are in ``out``; Ctrl-C says how to go on."""
    try:
        with loading_bar(of_bytes=False) as progress:
            yield progress
    except KeyboardInterrupt:
        print(f"Stopped; --resume goes on with {out}.", file=sys.stderr)
        raise


def announce(what: object) -> None:
    """A line about what comes, beside the output."""
    error_console.print(f"{what}", markup=False)


def progress_lines() -> ProgressCallback:
    """Progress as a line every ten seconds."""
    due_s = time.monotonic() + _LINE_PERIOD_S

    def update(done: int, total: int, label: str) -> None:
        nonlocal due_s
        if time.monotonic() < due_s:
            return
        due_s = time.monotonic() + _LINE_PERIOD_S
        print(f"{label} ({done / total:.0%})" if total else label, file=sys.stderr, flush=True)

    return update


def timing_line(
    timings: RequestTimings, *, prompt_tokens: int, output_tokens: int, drafts: Counter[str]
) -> str:
    """One line: tokens, time to the first one, time per token after it, tokens per second, and what
    was drafted (`draft_counts`)."""
    parts = [f"{prompt_tokens} + {output_tokens} tokens"]
    if timings.ttft_s is not None:
        parts.append(f"TTFT {timings.ttft_s * 1e3:.1f} ms")
    if timings.tpot_s:
        parts.append(f"TPOT {timings.tpot_s * 1e3:.2f} ms")
        parts.append(f"{1 / timings.tpot_s:.1f} tok/s")
    if drafted := drafts["drafted"]:
        parts.append(f"{drafts['accepted']} of {drafted} drafted tokens accepted")
    return " · ".join(parts)


def draft_counts(figures: SpeculationFigures | None) -> Counter[str]:
    """Tokens that were drafted and accepted until now, of which differences can be taken."""
    if figures is None:
        return Counter()
    return Counter(drafted=figures.num_drafted, accepted=figures.num_accepted)


def full_context_line(output: RequestOutput, max_tokens: int | None) -> str | None:
    """That an output ended because the context is full, if one did."""
    lengths = [
        len(sample.token_ids)
        for sample in output.outputs
        if sample.finish_reason is FinishReason.LENGTH
    ]
    cut = [length for length in lengths if max_tokens is None or length < max_tokens]
    if not cut:
        return None
    context = len(output.prompt_token_ids) + max(cut)
    limit = "" if max_tokens is None else f", before --max-tokens {max_tokens}"
    return f"The context of {context:,} tokens is full: the output ends there{limit}."


def roofline_line(report: RooflineReport) -> str:
    """One line: the share of the ceilings that each phase reached, and what was predicted."""
    parts = []
    for name, phase in (("prefill", report.prefill), ("decode", report.decode)):
        if not phase.seconds:
            continue
        if phase.mfu is None or phase.mbu is None:
            rate = phase.moved_bytes / phase.seconds / 1e9
            flops = phase.useful_flops / phase.seconds / 1e9
            parts.append(f"{name} {rate:.1f} GB/s, {flops:.1f} GFLOP/s")
            continue
        text = f"{name} MFU {phase.mfu:.0%} MBU {phase.mbu:.0%}"
        text += f" ({phase.bound})" if phase.bound else ""
        if phase.predicted_s:
            text += f", {phase.seconds * 1e3:.1f} ms (predicted {phase.predicted_s * 1e3:.1f})"
        parts.append(text)
    if parts and report.prefill.mfu is None and report.decode.mfu is None:
        parts.append("`ridgeline roofline` measures the ceilings")
    if report.experts is not None:
        parts.append(str(report.experts))
    return " · ".join([*parts, *report.warnings])
