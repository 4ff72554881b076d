"""``ridgeline chat``: a conversation on the terminal."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ridgeline.cli.display import error_console, loading_bar, timing_line
from ridgeline.cli.options import (
    Parser,
    add_model_options,
    add_sampling_options,
    engine_settings,
    sampling_params,
)
from ridgeline.core.errors import RequestError
from ridgeline.core.request import FinishReason
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine import LLM

HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer."


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add this command to the command line."""
    parser = commands.add_parser("chat", help="talk to a model")
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read turns from standard input until it ends; answers stream to standard output."""
    params = sampling_params(arguments)
    with loading_bar(enabled=sys.stderr.isatty()) as progress:
        llm = LLM(arguments.model, progress=progress, **engine_settings(arguments))
    with llm:
        llm.render_chat([{"role": "user", "content": "Hello"}])  # a model without template: say so
        error_console.print(f"{llm.name}. {HELP}", style="dim")
        conversation = Conversation(llm, params, arguments.system)
        for line in _turns():
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line:
                conversation.answer(line)
    return 0


class Conversation:
    """Messages so far; a turn that fails or is stopped before a word leaves them as they were."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def answer(self, text: str) -> None:
        """Stream the answer to one turn."""
        turn = [*self.messages, {"role": "user", "content": text}]
        console = Console(highlight=False, soft_wrap=True)
        parts: list[str] = []
        try:
            stream = self._llm.stream(self._llm.encode_chat(turn), self._params)
        except RequestError as error:
            error_console.print(f"error: {error}", style="red", markup=False)
            return
        with _interrupt_flag() as interrupted:
            for chunk in stream:
                parts.append(chunk.text)
                console.out(chunk.text, end="", highlight=False)
                if interrupted.is_set():
                    stream.close()
        console.out("")
        if parts:
            self.messages = [*turn, {"role": "assistant", "content": "".join(parts)}]
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


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the flag instead of raising in the middle of a step."""
    flag = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: flag.set())
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


def _turns() -> Iterator[str]:
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
