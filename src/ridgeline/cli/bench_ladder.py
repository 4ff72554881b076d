"""``ridgeline bench ladder``: from eager PyTorch to speculation, rung by rung."""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ridgeline.cli.display import (
    figure,
    loading_bar,
    output_console,
    progress_lines,
    with_interval,
)
from ridgeline.cli.options import Parser
from ridgeline.cli.report_file import check_new_files
from ridgeline.core.errors import DiskError, InvalidRequestError
from ridgeline.roofline.history import past_errors, past_sentences

_SUBJECTS = ("embedded", "1b")


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--subjects",
        default=_SUBJECTS[0],
        metavar="NAME,NAME",
        help="embedded (real weights, the default), 1b (random weights, recorded acceptance)",
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of each text")
    parser.add_argument("--texts", type=int, default=8, metavar="N", help="recorded texts, up to 8")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="visits of each rung")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure first what predicts (5 to 30 minutes)"
    )
    parser.add_argument("--measure-only", action="store_true", help="predict nothing")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw into a file as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict, then measure and print rung by rung, or one JSON object."""
    subjects = arguments.subjects.split(",")
    if not set(subjects) <= set(_SUBJECTS):
        raise InvalidRequestError(f"--subjects are of {', '.join(_SUBJECTS)}.")
    for name, least, most in (("tokens", 2, 112), ("texts", 1, 8), ("rounds", 1, 100)):
        if not least <= getattr(arguments, name) <= most:
            raise InvalidRequestError(f"--{name} must be between {least} and {most}.")
    if arguments.measure_only and arguments.calibrate:
        raise InvalidRequestError("--calibrate is for predictions; --measure-only makes none.")
    check_new_files([arguments.svg])
    from ridgeline.bench.conditions import Watch
    from ridgeline.bench.ladder.ladder import climb, report  # torch takes a second
    from ridgeline.cli.hardware import calibration_of, kept_calibration

    executors = () if arguments.measure_only else ("reference", "cpu")
    found = {
        name: calibration_of(name, anew=True) if arguments.calibrate else kept_calibration(name)
        for name in executors
    }
    calibrations = {name: each for name, each in found.items() if each is not None}
    watch = Watch()
    with ExitStack() as stack:
        # A bar would stand where the rungs are printed.
        progress = progress_lines()
        if arguments.json:
            progress = stack.enter_context(loading_bar(of_bytes=False))
        steps = {}
        for name in subjects:
            if not arguments.json:
                _print_header(name)
            steps[name] = climb(
                name,
                calibrations,
                num_tokens=arguments.tokens,
                num_texts=arguments.texts,
                rounds=arguments.rounds,
                progress=progress,
                show=None if arguments.json else _print_rung,
            )
    formats = {rung.format for each in steps.values() for rung in each}
    past = [text for name in calibrations for text in past_sentences(past_errors(name, formats))]
    result = report(steps, watch) | {"past_errors": past}
    if arguments.json:
        print(json.dumps(result))
    else:
        _print_notes(result["conditions"], [name for name in executors if found[name] is None])
        for text in past:
            _print_line(text)
    if arguments.svg is not None:
        from ridgeline.bench.ladder.drawing import draw

        try:
            draw(result["subjects"], arguments.svg)
        except OSError as error:
            raise DiskError(f"{arguments.svg} cannot be written: {error.strerror}.") from error
    return 0


# Columns and their widths, in which the longest rung has room; with the names 100 wide.
_COLUMNS = {
    "weights": 7,
    "resident": 9,
    "predicted": 10,
    "tok/s (rounds)": 17,
    "speed-up": 9,
    "ppl": 6,
    "KL": 8,
}
_NAME_WIDTH = 34


def _print_header(subject: str) -> None:
    names = "".join(name.rjust(width) for name, width in _COLUMNS.items())
    _print_line(subject.ljust(_NAME_WIDTH) + names, style="bold")


def _print_rung(rung: Mapping[str, Any]) -> None:
    spoken = "" if rung["drafting"] == "off" else f" ({rung['drafting']})"
    rates = rung["rounds_tok_s"]
    cells = (
        _size(rung["weights_bytes"]),
        _size(rung["resident_bytes"]),
        "" if rung["predicted_tok_s"] is None else figure(rung["predicted_tok_s"]),
        with_interval(rung["measured_tok_s"], min(rates), max(rates)),
        f"{figure(rung['speed_up'])}×",
        "" if rung["perplexity"] is None else f"{rung['perplexity']:.2f}",
        "" if rung["kl"] is None else f"{rung['kl']:.1e}",
    )
    widths = _COLUMNS.values()
    figures = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    _print_line((rung["name"] + spoken).ljust(_NAME_WIDTH) + "".join(figures))


def _print_notes(conditions: Mapping[str, Any], uncalibrated: Sequence[str]) -> None:
    _print_line("Rounds: the slowest and the fastest of them; the figure is their median.")
    if uncalibrated:
        _print_line(
            f"Nothing is predicted for {' and '.join(uncalibrated)}: not calibrated here "
            "(--calibrate, 5 to 15 minutes each)."
        )
    if conditions["contended"]:
        _print_line(
            f"Other processes took {conditions['others_share']:.0%} of the processors: these "
            "figures are too low.",
            style="yellow",
        )


def _print_line(text: str, style: str | None = None) -> None:
    output_console().print(text.rstrip(), style=style, markup=False, soft_wrap=True)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
