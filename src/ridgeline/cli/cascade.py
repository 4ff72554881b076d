"""``ridgeline cascade calibrate``: when a small model's answer will do, by one's own requests."""

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.cli.display import output_console, print_columns, print_paragraph, status_line
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from ridgeline.fleet.cascade_calibration import CascadeThreshold


def add_options(parser: Parser) -> None:
    """What is done with a cascade: it is calibrated."""
    commands = parser.add_subparsers(
        required=True, title="commands", metavar="COMMAND", parser_class=Parser
    )
    text = "find the threshold of `ridgeline route --cascade`"
    found: Parser = commands.add_parser(
        "calibrate", prog="ridgeline cascade calibrate", help=text, description=text
    )
    found.add_argument(
        "sample",
        type=Path,
        metavar="SAMPLE.jsonl",
        help="bodies of requests, each with prompt or messages, perhaps with the expected text",
    )
    found.add_argument("--small", required=True, metavar="URL", help="server of the small model")
    found.add_argument("--large", required=True, metavar="URL", help="and of the large one")
    found.add_argument(
        "--risk", type=float, default=0.05, metavar="P", help="of a worse answer; default 0.05"
    )
    found.add_argument("--api-key", metavar="KEY")
    found.add_argument("--json", action="store_true", help="print one JSON object")
    found.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if a cascade is not worth it here."""
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.fleet.cascade_calibration import EXPECTED, ask_pairs, cascade_threshold

    if not 0 < arguments.risk < 1:
        raise InvalidRequestError("--risk is a chance, between 0 and 1.")
    sample = _read(arguments.sample)
    small, large = (
        HttpTarget(url, model="", api_key=arguments.api_key)
        for url in (arguments.small, arguments.large)
    )
    with status_line("asking both models"):
        pairs = asyncio.run(ask_pairs(sample, small, large))
    found = cascade_threshold(pairs, arguments.risk)
    if arguments.json:
        print(json.dumps(found.told() | {"requests": len(pairs), "worth_it": found.is_worth_it}))
    else:
        _print(found, len(pairs), arguments.risk, any(EXPECTED in each for each in sample))
    return 0 if found.is_worth_it else 1


def _read(path: Path) -> list[dict[str, Any]]:
    from ridgeline.fleet.cascade_calibration import EXPECTED

    try:
        lines = path.read_bytes().splitlines()
        found = [msgspec.json.decode(each, type=dict[str, Any]) for each in lines if each.strip()]
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"{path}: a line is no JSON object: {error}") from None
    for number, each in enumerate(found, start=1):
        if ("prompt" in each) == ("messages" in each):
            raise InvalidRequestError(f"{path}, request {number}: give prompt or messages.")
        if not isinstance(each.get(EXPECTED, ""), str):
            raise InvalidRequestError(f"{path}, request {number}: expected is a text.")
    if not found:
        raise InvalidRequestError(f"{path} is empty.")
    return found


def _print(found: "CascadeThreshold", count: int, risk: float, has_expected: bool) -> None:
    console = output_console()
    right = "right" if has_expected else "as the large one"
    rows = [
        (name, f"{share:.1%}", f"{1e3 * seconds:,.1f}", f"{seconds / found.seconds[2]:.2f}")
        for name, share, seconds in zip(
            ("small", "cascade", "large"), found.right, found.seconds, strict=True
        )
    ]
    rows.insert(2, ("as many at random", f"{found.mixed_right:.1%}", "", ""))
    print_columns(console, ("", right, "ms a request", "of the large one's"), rows)
    print_paragraph(
        console,
        f"{found.kept:.0%} of {count} requests stay with the small model, {found.lost:.1%} lose a "
        f"right answer; of others like these at most {found.bound:.1%} will (asked: {risk:.1%}).",
        indent=2,
    )
    if found.is_worth_it:
        least = math.ceil(1e4 * found.threshold) / 1e4  # rather the large model once too often
        print(f"ridgeline route … --cascade SMALL --cascade-threshold {least:g}")
    else:
        text = (
            "Do not use a cascade here: the large model alone costs less, or chance does as well."
        )
        print_paragraph(console, text, indent=2)
