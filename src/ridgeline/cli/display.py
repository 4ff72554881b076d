"""What commands show on a terminal beside their answer; all of it goes to standard error."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from ridgeline.core.request import RequestTimings
from ridgeline.engine.loading import Progress as ProgressCallback

error_console = Console(stderr=True, highlight=False)


@contextmanager
def loading_bar(*, enabled: bool) -> Iterator[ProgressCallback | None]:
    """A progress bar for loading and downloading, gone when it is done; ``None`` if disabled."""
    if not enabled:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=error_console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(done: int, total: int, label: str) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label)
            bar.update(tasks[label], completed=done, total=total or None)

        yield update


def timing_line(timings: RequestTimings, *, prompt_tokens: int, output_tokens: int) -> str:
    """One line: tokens, time to the first one, time per token after it, and tokens per second."""
    parts = [f"{prompt_tokens} + {output_tokens} tokens"]
    if timings.ttft_s is not None:
        parts.append(f"TTFT {timings.ttft_s * 1e3:.1f} ms")
    if timings.tpot_s:
        parts.append(f"TPOT {timings.tpot_s * 1e3:.2f} ms")
        parts.append(f"{1 / timings.tpot_s:.1f} tok/s")
    return " · ".join(parts)
