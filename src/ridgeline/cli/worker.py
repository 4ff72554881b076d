"""``ridgeline worker``: this machine computes a part of a model that another one serves."""

import argparse
from pathlib import Path

from ridgeline.cli.options import Parser


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="where this machine has the model; default: the name that the other one gives",
    )
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="the other machine's worker_address"
    )
    parser.add_argument(
        "--key-file", required=True, metavar="FILE", help="its worker_key_file's key, mode 0600"
    )
    parser.add_argument(
        "--once", action="store_true", help="end when it has gone, and do not join again"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, or once."""
    from ridgeline.core.doors import read_address
    from ridgeline.core.encryption import read_key
    from ridgeline.executors.distributed.worker import JoiningMachine

    address, key = read_address(arguments.join), read_key(Path(arguments.key_file))
    JoiningMachine(address, key, arguments.model, _say).run(once=arguments.once)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
