"""``ridgeline chat``: a conversation on the terminal."""

import argparse
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from ridgeline.cli.display import error_console, full_context_line, loading_bar, timing_line
from ridgeline.cli.options import (
    Parser,
    add_model_options,
    add_sampling_options,
    engine_settings,
    sampling_params,
)
from ridgeline.core.errors import InvalidRequestError, RequestError
from ridgeline.core.request import FinishReason
from ridgeline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.stream import CompletionStream

HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer."
_COMMAND = re.compile(r"/\w*(\s.*)?")  # a path, such as /etc/hosts, is none


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read turns from standard input until it ends; answers stream to standard output."""
    if sampling_params(arguments).n != 1:
        raise InvalidRequestError("A chat has one answer to each turn; n must be 1.")
    from ridgeline.engine.llm import LLM  # torch takes a second: not for --help

    with loading_bar() as progress:
        llm = LLM(arguments.model, progress=progress, **engine_settings(arguments))
    with llm:
        llm.render_chat([{"role": "user", "content": "Hello"}])  # a model without template: say so
        error_console.print(f"{llm.name}. {HELP}", style="dim", soft_wrap=True)
        params = sampling_params(arguments, **llm.sampling_defaults)
        conversation = Conversation(llm, params, arguments.system)
        for line in _turns():
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line == "/help":
                error_console.print(HELP, style="dim")
            elif _COMMAND.fullmatch(line):
                error_console.print(f"There is no such command. {HELP}", style="red")
            elif line:
                conversation.answer(line)
    return 0


class Conversation:
    """Messages so far; a turn that fails or is stopped before a word leaves them as they were."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def answer(self, question: str) -> None:
        """Stream the answer to one turn."""
        turn = [*self.messages, {"role": "user", "content": question}]
        console = Console(highlight=False, soft_wrap=True)
        parts: list[str] = []
        try:
            stream = self._llm.stream(self._llm.encode_chat(turn), self._params)
        except RequestError as error:
            error_console.print(f"error: {error}", style="red", markup=False)
            return
        with _interrupts_close(stream):
            for chunk in stream:
                parts.append(chunk.text)
                console.out(chunk.text, end="", highlight=False)
        console.out("")
        if text := "".join(parts):
            self.messages = [*turn, {"role": "assistant", "content": text}]
        output = stream.output()
        if output.timings is not None:
            (sample,) = output.outputs
            line = timing_line(
                output.timings,
                prompt_tokens=len(output.prompt_token_ids),
                output_tokens=len(sample.token_ids),
            )
            stopped = " · stopped" if sample.finish_reason is FinishReason.ABORT else ""
            error_console.print(line + stopped, style="dim")
        if (warning := full_context_line(output, self._params.max_tokens)) is not None:
            error_console.print(warning, style="yellow", soft_wrap=True)


@contextmanager
def _interrupts_close(stream: "CompletionStream") -> Iterator[None]:
    """Ctrl-C ends the answer after the step that runs, instead of raising in the middle of it."""
    before = signal.signal(signal.SIGINT, lambda *_: stream.request_close())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _turns() -> Iterator[str]:
    while sys.stdin is not None:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
