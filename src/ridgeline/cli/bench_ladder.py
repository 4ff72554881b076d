"""``ridgeline bench ladder``: from eager PyTorch to speculation, rung by rung."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import loading_bar
from ridgeline.cli.options import Parser
from ridgeline.core.errors import DiskError, InvalidRequestError

_SUBJECTS = ("embedded", "1b")


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--subjects",
        default=",".join(_SUBJECTS),
        metavar="NAME,NAME",
        help="embedded (real weights), 1b (random weights, recorded acceptance)",
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of each text")
    parser.add_argument("--texts", type=int, default=8, metavar="N", help="recorded texts, up to 8")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="visits of each rung")
    parser.add_argument("--calibrate", action="store_true", help="measure what predicts anew")
    parser.add_argument("--measure-only", action="store_true", help="predict nothing")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw into a file as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict, measure, then print a table or one JSON object."""
    subjects = arguments.subjects.split(",")
    if not set(subjects) <= set(_SUBJECTS):
        raise InvalidRequestError(f"--subjects are of {', '.join(_SUBJECTS)}.")
    for name, least, most in (("tokens", 2, 112), ("texts", 1, 8), ("rounds", 1, 100)):
        if not least <= getattr(arguments, name) <= most:
            raise InvalidRequestError(f"--{name} must be between {least} and {most}.")
    if arguments.measure_only and arguments.calibrate:
        raise InvalidRequestError("--calibrate is for predictions; --measure-only makes none.")
    from ridgeline.bench.conditions import Watch
    from ridgeline.bench.ladder.ladder import climb, report  # torch takes a second
    from ridgeline.cli.hardware import calibration_of

    executors = () if arguments.measure_only else ("reference", "cpu")
    calibrations = {name: calibration_of(name, anew=arguments.calibrate) for name in executors}
    watch = Watch()
    with loading_bar(of_bytes=False) as progress:
        steps = {
            name: climb(
                name,
                calibrations,
                num_tokens=arguments.tokens,
                num_texts=arguments.texts,
                rounds=arguments.rounds,
                progress=progress,
            )
            for name in subjects
        }
    result = report(steps, watch)
    if arguments.json:
        print(json.dumps(result))
    else:
        print_ladder(result["subjects"])
    if arguments.svg is not None:
        from ridgeline.bench.ladder.drawing import draw

        try:
            draw(result["subjects"], arguments.svg)
        except OSError as error:
            raise DiskError(f"{arguments.svg} cannot be written: {error.strerror}.") from error
    return 0


def print_ladder(subjects: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """One table for all subjects."""
    table = Table(box=None)
    for column in ("rung", "weights", "resident", "predicted", "tok/s", "speed-up", "ppl", "KL"):
        table.add_column(column, justify="left" if column == "rung" else "right")
    for name, rungs in subjects.items():
        table.add_row(f"[bold]{name}[/bold]")
        for rung in rungs:
            spoken = "" if rung["drafting"] == "off" else f" ({rung['drafting']})"
            table.add_row(
                rung["name"] + spoken,
                f"{rung['weights_bytes'] / 1e6:,.0f} MB",
                f"{rung['resident_bytes'] / 1e6:,.0f} MB",
                _number(rung["predicted_tok_s"], ",.1f"),
                f"{rung['measured_tok_s']:,.1f}",
                f"{rung['speed_up']:.2f}×",
                _number(rung["perplexity"], ".2f"),
                _number(rung["kl"], ".1e"),
            )
    Console(highlight=False).print(table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
