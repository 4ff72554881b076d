"""``--html FILE`` of commands, which writes over nothing."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from ridgeline.cli.options import Parser
from ridgeline.core.errors import DiskError, InvalidRequestError


def add_html_option(parser: Parser) -> None:
    """``--html``."""
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report to read and to send as well"
    )


def check_new_files(paths: Iterable[Path | None], *, force: bool | None = None) -> None:
    """Before anything takes time: that each file can be written, and without ``force`` is not there
    yet; ``None``: the command has no --force.

    Raises:
        InvalidRequestError: one is there already.
        DiskError: its folder is not.
    """
    for path in paths:
        if path is None:
            continue
        if path.exists() and not force:
            hint = "it is not written over" if force is None else "--force writes over it"
            raise InvalidRequestError(f"{path} is there already: {hint}.")
        if not path.absolute().parent.is_dir():
            raise DiskError(f"{path} cannot be written: there is no such folder.")


def write_html(arguments: argparse.Namespace, text: str) -> None:
    """Write the report where it was asked for. Raises `DiskError`."""
    try:
        with arguments.html.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DiskError(f"{arguments.html} cannot be written: {error.strerror}.") from error
