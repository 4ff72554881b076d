"""What commands show on a terminal beside their answer; all of it goes to standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from ridgeline.core.request import RequestTimings
from ridgeline.roofline.live import RooflineReport

ProgressCallback = Callable[[int, int, str], None]

_LINE_EVERY_S = 15.0

error_console = Console(stderr=True, highlight=False)


@contextmanager
def loading_bar(*, enabled: bool) -> Iterator[ProgressCallback | None]:
    """A progress bar for loading and downloading, gone when it is done; ``None`` if disabled."""
    if not enabled:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=error_console, transient=True) as bar:
        task = bar.add_task("loading")

        def update(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total or None, description=label[:32])

        yield update


@contextmanager
def measuring_bar(*, every_s: float = _LINE_EVERY_S) -> Iterator[ProgressCallback]:
    """A progress bar for minutes of measurements; where standard error is no terminal, a line of
    how far they are every ``every_s`` seconds."""
    if not error_console.is_terminal:
        yield _lines(every_s)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=error_console, transient=True) as bar:
        task = bar.add_task("measuring")

        def update(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total or None, description=label[:48])

        yield update


def _lines(every_s: float) -> ProgressCallback:
    last_s = time.monotonic()

    def tell(done: int, total: int, label: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= every_s:
            last_s = time.monotonic()
            error_console.print(f"{done} of {total}: {label}", markup=False, soft_wrap=True)

    return tell


def timing_line(timings: RequestTimings, *, prompt_tokens: int, output_tokens: int) -> str:
    """One line: tokens, time to the first one, time per token after it, and tokens per second."""
    parts = [f"{prompt_tokens} + {output_tokens} tokens"]
    if timings.ttft_s is not None:
        parts.append(f"TTFT {timings.ttft_s * 1e3:.1f} ms")
    if timings.tpot_s:
        parts.append(f"TPOT {timings.tpot_s * 1e3:.2f} ms")
        parts.append(f"{1 / timings.tpot_s:.1f} tok/s")
    return " · ".join(parts)


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
            text += f", predicted {phase.predicted_s / phase.seconds:.0%} of its time"
        parts.append(text)
    if parts and report.prefill.mfu is None and report.decode.mfu is None:
        parts.append("`ridgeline roofline` measures the ceilings")
    return " · ".join([*parts, *report.warnings])
