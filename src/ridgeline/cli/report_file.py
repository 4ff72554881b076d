"""``--html FILE`` of commands, which writes over nothing."""

import argparse
import os
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
        DiskError: its folder is not there, or takes none.
    """
    for path in paths:
        if path is None:
            continue
        if path.exists() and not force:
            hint = "it is not written over" if force is None else "--force writes over it"
            raise InvalidRequestError(f"{path} is there already: {hint}.")
        folder = path.absolute().parent
        if not folder.is_dir():
            raise DiskError(f"{path} cannot be written: there is no such folder.")
        if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise DiskError(f"{path} cannot be written: it is a folder, or in one of others.")


def write_html(arguments: argparse.Namespace, text: str) -> None:
    """Write the report where it was asked for. Raises `DiskError`."""
    try:
        with arguments.html.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise DiskError(f"{arguments.html} cannot be written: {error.strerror}.") from error
