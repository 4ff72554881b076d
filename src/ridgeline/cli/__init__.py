"""The ``ridgeline`` command: one file for each subcommand."""

from ridgeline.cli.main import main

__all__ = ["main"]
