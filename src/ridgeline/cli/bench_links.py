"""``ridgeline bench links``: bandwidth and latency between the processes of one model."""

import argparse
import json

from rich.table import Table

from ridgeline.cli.display import output_console
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.settings.parallel import MAX_RANKS


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, then print a table or one JSON object."""
    if not 2 <= arguments.ranks <= MAX_RANKS:
        raise InvalidRequestError(f"--ranks must be between 2 and {MAX_RANKS}.")
    from ridgeline.bench.links import measure_links

    report = measure_links(arguments.ranks)
    if arguments.json:
        print(json.dumps(report.to_json()))
        return 0
    console = output_console()
    table = Table(box=None)
    for column in ("part, bytes", "exchange, µs", "sent by a rank, GB/s"):
        table.add_column(column, justify="right")
    for index, size in enumerate(report.part_bytes):
        micros, rate = report.seconds[index] * 1e6, report.rate(index) / 1e9
        table.add_row(f"{size:,}", f"{micros:,.1f}", f"{rate:.2f}")
    console.print(table)
    link = report.link
    console.print(
        f"{report.num_ranks} ranks, all-gather through shared memory: "
        f"{link.latency_s * 1e6:.1f} µs and {link.bytes_per_s / 1e9:.2f} GB/s."
    )
    return 0
