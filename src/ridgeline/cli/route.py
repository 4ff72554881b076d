"""``ridgeline route``: one address in front of several engines."""

import argparse

from ridgeline.cli.options import Parser, add_settings, given_settings
from ridgeline.fleet.config import RouterConfig


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_settings(parser, RouterConfig, title="router", shown=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Route until SIGTERM or Ctrl-C."""
    from ridgeline.fleet.serving import route

    route(RouterConfig(**given_settings(arguments, RouterConfig)))
    return 0
