"""``ridgeline bench figures``: published figures, and what this machine has beside them."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.cli.display import loading_bar, output_console, print_paragraph
from ridgeline.cli.options import Parser, duration
from ridgeline.cli.report_file import check_new_files
from ridgeline.core.errors import DiskError, InvalidRequestError


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--budget", type=duration, default="15m", metavar="T", help="15m, the default, or 90s, 1h"
    )
    parser.add_argument("--only", metavar="ROW,ROW", help="of the list of features: K1,B7")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a Markdown page as well")
    parser.add_argument("--force", action="store_true", help="write over the page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run what fits into the budget; print it beside what was published."""
    check_new_files([arguments.page], force=arguments.force)
    from ridgeline.bench.figures import FIGURES, Answers, page, reproduce

    figures = FIGURES
    if arguments.only is not None:
        wanted = {row.strip().upper() for row in arguments.only.split(",")}
        if unknown := wanted - {figure.row for figure in FIGURES}:
            raise InvalidRequestError(f"No published figure is of {', '.join(sorted(unknown))}.")
        figures = tuple(figure for figure in FIGURES if figure.row in wanted)
    with loading_bar(of_bytes=False) as progress:
        found = reproduce(figures, Answers(), budget_s=arguments.budget, progress=progress)
    if arguments.page is not None:
        try:
            arguments.page.write_text(page(found), encoding="utf-8")
        except OSError as error:
            raise DiskError(f"{arguments.page} cannot be written: {error.strerror}.") from error
    if arguments.json:
        print(json.dumps(found))
    else:
        _print(found["figures"])
    return 0


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    from ridgeline.bench.figures.page import amount, published

    console = output_console()
    answered = [row for row in rows if row["ours"] is not None]
    for row in answered:
        ours = amount(row["ours"], row["unit"])
        text = f"{row['row']} {row['what']}: published {published(row)}, here {ours}"
        if row["verdict"] != "as published":
            text += f" ({row['verdict']}). {row['note']}".rstrip()
        print_paragraph(console, text, indent=4)
    for row in rows:
        if row["ours"] is None:
            text = f"{row['row']} {row['what']}: published {published(row)}. {row['why_not']}"
            print_paragraph(console, text, indent=4, style="dim")
    same = sum(row["verdict"] == "as published" for row in answered)
    unrun = sum(row["verdict"] == "not run" for row in rows)
    console.print(f"{same} of {len(answered)} as published.", style="bold")
    if unrun:
        console.print(f"{unrun} were not run; the same command goes on for a day.")
