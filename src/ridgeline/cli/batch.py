"""``ridgeline batch``: answer a file of requests, as the Batch API would."""

import argparse
import asyncio
import json
import sys
from itertools import count
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ridgeline.cli.display import error_console, loading_bar, progress_lines
from ridgeline.cli.options import Parser, add_model_options, engine_settings
from ridgeline.core.config import EngineConfig, with_overrides


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("input", type=Path, metavar="INPUT", help="JSONL as for the Batch API")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE",
        help="answers; what failed goes to FILE with .errors before its ending",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="lines that run at once"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every line that has no answer in the output yet; 1 if a line failed."""
    from ridgeline.server.jobs.offline import OfflineBatch  # torch takes a second: not for --help

    config = with_overrides(EngineConfig(model=arguments.model), **engine_settings(arguments))
    batch = OfflineBatch(arguments.input, arguments.output, concurrency=arguments.concurrency)
    with loading_bar() as loading:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeRemainingColumn(), console=error_console, transient=True,
            disable=arguments.json or not sys.stderr.isatty(),
        ) as bar:  # fmt: skip
            task = bar.add_task("lines", total=batch.total, completed=batch.done)
            show, done = progress_lines(), count(batch.done + 1)

            def advance() -> None:
                bar.advance(task)
                if bar.disable and not arguments.json:
                    show(next(done), batch.total, "lines")

            counts = asyncio.run(batch.run(config, progress=loading, on_line=advance))
    if arguments.json:
        print(json.dumps(counts))
    else:
        error_console.print(f"{counts['completed']} answered, {counts['failed']} failed.")
    return 1 if counts["failed"] else 0
