"""``ridgeline chat``: a conversation on the terminal."""

import argparse
import re

from ridgeline.cli.display import error_console
from ridgeline.cli.line_input import read_lines
from ridgeline.cli.options import (
    Parser,
    add_model_options,
    add_sampling_options,
    piped_text,
    sampling_params,
)
from ridgeline.core.errors import InvalidRequestError, RidgelineError

_COMMAND = re.compile(r"/\w*(\s.*)?", re.DOTALL)  # a path, such as /etc/hosts, is none


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument(
        "words", nargs="*", metavar="PROMPT", help="answer this alone, after what is piped in"
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the same as PROMPT")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--plain", action="store_true", help="print text, not rendered Markdown")
    parser.add_argument(
        "--show-reasoning", action="store_true", help="print what the model thinks, not one line"
    )
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read turns from standard input until it ends, or answer one prompt; answers stream to
    standard output."""
    if sampling_params(arguments).n != 1:
        raise InvalidRequestError("A chat has one answer to each turn; n must be 1.")
    prompt = _prompt(arguments)
    from ridgeline.cli.chat_session import COMMANDS, Chat  # tokenizers take their time

    with Chat(arguments) as chat:
        chat.greet(has_commands=prompt is None)
        if prompt is not None:
            return 0 if chat.ask(prompt) else 1
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


def _prompt(arguments: argparse.Namespace) -> str | None:
    """The one turn of the command line, with what is piped in before it; ``None``: a conversation.

    Raises:
        InvalidRequestError: it is there twice, or what is piped in is not UTF-8.
    """
    words = " ".join(arguments.words)
    if words and arguments.prompt is not None:
        raise InvalidRequestError("The prompt is there twice: as PROMPT and as --prompt.")
    if not arguments.words and arguments.prompt is None:
        return None
    prompt = words or arguments.prompt
    if not prompt:
        raise InvalidRequestError("The prompt is empty; without one, this is a conversation.")
    piped = (piped_text() or "").strip()
    return f"{piped}\n\n{prompt}" if piped else str(prompt)
