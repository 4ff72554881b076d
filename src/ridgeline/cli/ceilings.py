"""``ridgeline ceilings``: what this machine gives at best, within half a minute."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.cli.bench import print_ceilings
from ridgeline.cli.display import loading_bar, output_console, print_paragraph
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError

_ROUNDS = 2
_BUDGET_S = 30.0
_LAST_S = 4.0  # of it: what has begun, and a GPU's bus


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="write and read 512 MB there as well"
    )
    parser.add_argument(
        "--connect", metavar="HOST:PORT", help="the network to a host with --listen as well"
    )
    parser.add_argument(
        "--listen",
        nargs="?",
        const="127.0.0.1:7800",
        metavar="HOST:PORT",
        help="only answer one --connect, without a password; default 127.0.0.1:7800",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure one after another, since they would disturb each other, within half a minute."""
    until_s = time.monotonic() + _BUDGET_S - _LAST_S
    from ridgeline.bench import io_ceilings
    from ridgeline.bench.ceilings import measure_ceilings
    from ridgeline.bench.native_loops import load_native_loops

    if arguments.listen is not None:
        if arguments.disk or arguments.connect or arguments.json:
            raise InvalidRequestError("--listen only answers; measure with --connect there.")
        io_ceilings.listen(
            *io_ceilings.address(arguments.listen),
            ready=lambda where: print(f"Listening on {where}.", file=sys.stderr, flush=True),
        )
        return 0
    peer = None if arguments.connect is None else io_ceilings.address(arguments.connect)
    network = None if peer is None else asdict(io_ceilings.network_rates(*peer))
    disk = None if arguments.disk is None else asdict(io_ceilings.disk_rates(arguments.disk))
    with loading_bar(of_bytes=False) as progress:
        report = measure_ceilings(
            load_native_loops(), rounds=_ROUNDS, progress=progress, until_s=until_s
        )
    bus = [asdict(each) for each in io_ceilings.bus_rates()]
    result = {**report.to_json(), "disk": disk, "network": network, "pcie": bus}
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _print(result: Mapping[str, Any]) -> None:
    console = output_console()
    print_ceilings(console, result)
    if disk := result["disk"]:
        how = "past the page cache" if disk["direct"] else "with fsync, its pages dropped"
        console.print(
            f"Disk: write {_rate(disk['write_bytes_per_s'])}, read "
            f"{_rate(disk['read_bytes_per_s'])} ({how})",
            markup=False,
        )
    if network := result["network"]:
        console.print(
            f"Network to {network['peer']}: send {_rate(network['send_bytes_per_s'])}, receive "
            f"{_rate(network['receive_bytes_per_s'])}, round trip "
            f"{network['round_trip_s'] * 1e6:,.0f} µs",
            markup=False,
        )
    for bus in result["pcie"]:
        console.print(
            f"PCIe to {bus['device']}: {_rate(bus['to_device_bytes_per_s'])}, back "
            f"{_rate(bus['to_host_bytes_per_s'])}",
            markup=False,
        )
    if not result["pcie"]:
        console.print("PCIe: no GPU")
    if missing := result["left_out"]:
        print_paragraph(
            console,
            f"Left out, as the machine is busy and {_BUDGET_S:.0f} s were over: "
            f"{', '.join(missing)}.",
            indent=2,
            style="yellow",
        )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"
