"""``ridgeline completion``: what a shell reads to complete our commands and options."""

import argparse

import shtab

from ridgeline.cli.options import Parser


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "shell",
        choices=shtab.SUPPORTED_SHELLS,
        help="bash: put the output into ~/.local/share/bash-completion/completions/ridgeline; zsh: "
        "into _ridgeline in a folder of $fpath",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from ridgeline.cli.main import build_parser  # which imports the module of each command

    parser = build_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                command.load_options()
    print(shtab.complete(parser, arguments.shell))
    return 0
