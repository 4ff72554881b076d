"""``ridgeline chat``: a conversation on the terminal."""

import argparse
import re

from ridgeline.cli.display import error_console
from ridgeline.cli.line_input import read_lines
from ridgeline.cli.options import Parser, add_model_options, add_sampling_options, sampling_params
from ridgeline.core.errors import InvalidRequestError, RidgelineError

_COMMAND = re.compile(r"/\w*(\s.*)?", re.DOTALL)  # a path, such as /etc/hosts, is none


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--plain", action="store_true", help="print text, not rendered Markdown")
    parser.add_argument(
        "--show-reasoning", action="store_true", help="print what the model thinks, not one line"
    )
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read turns from standard input until it ends; answers stream to standard output."""
    if sampling_params(arguments).n != 1:
        raise InvalidRequestError("A chat has one answer to each turn; n must be 1.")
    from ridgeline.cli.chat_session import COMMANDS, Chat  # tokenizers take their time

    with Chat(arguments) as chat:
        for line in read_lines(COMMANDS, chat.status):
            try:
                if line == "/exit":
                    break
                if _COMMAND.fullmatch(line):
                    chat.command(line)
                elif line:
                    chat.ask(line)
            except RidgelineError as error:
                error_console.print(f"error: {error}", style="red", markup=False)
    return 0
