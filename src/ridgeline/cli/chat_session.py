"""A conversation with a loaded model, and the commands of ``ridgeline chat``."""

import argparse
import dataclasses
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ridgeline.cli.answer_view import AnswerView, MarkdownView, PlainView
from ridgeline.cli.display import (
    draft_counts,
    error_console,
    full_context_line,
    loading_bar,
    roofline_line,
    timing_line,
)
from ridgeline.cli.options import engine_settings, given_settings
from ridgeline.cli.transcript import Transcript, quoted_file, read_text
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ChatTemplateError, InvalidRequestError, RidgelineError
from ridgeline.core.request import FinishReason, RequestOutput
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.spelling import suggestion
from ridgeline.engine.llm import LLM
from ridgeline.engine.loading import describe_model
from ridgeline.engine.stream import CompletionStream
from ridgeline.text.output import (
    Content,
    Event,
    Reasoning,
    choose_reasoning_parser,
    output_parser,
    reads_special_tokens,
)

COMMANDS = {
    "/help": "this list",
    "/system": "[TEXT]  show or set the system message; - for none",
    "/retry": "answer the last question again",
    "/undo": "forget the last turn",
    "/reset": "forget every turn",
    "/file": "PATH [QUESTION]  put a text file into the next question",
    "/save": "PATH  write the conversation as JSON",
    "/load": "PATH  go on with one",
    "/set": "[NAME VALUE]  show or set how answers are sampled",
    "/stats": "tokens, speed and room in the context",
    "/model": "[NAME]  show the model, or go on with another",
    "/exit": "end it; so does Ctrl-D",
}
HELP = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."
_KEYS = 'Alt-Enter or Ctrl-J begins a new line, and """ a text of several lines.'
_DEMONSTRATION = (
    "This is the embedded model, a demonstration of 9 million parameters: it makes little sense. "
    "A real one: ridgeline chat Qwen/Qwen3-0.6B, or any other name of the Hugging Face hub, a "
    "folder, or a GGUF file."
)
_ANSWER_SHARE = 4  # of the context a quarter is left to the answer


class Chat:
    """A loaded model and the conversation with it; what fails leaves the conversation as it was.

    Commands and questions raise RidgelineError.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.transcript = Transcript(arguments.system)
        self._attached: list[str] = []  # files for the next question
        self._last: RequestOutput | None = None
        self._drafts: Counter[str] = Counter()  # of the last answer
        self._output_tokens = 0
        self._given = given_settings(arguments, SamplingParams)
        self._llm = self._opened(arguments.model)

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def _opened(self, name: str | None) -> LLM:
        """The model, once it is loaded and known to have a chat template."""
        with loading_bar() as progress:
            llm = LLM(name, progress=progress, **engine_settings(self._arguments))
        try:
            llm.render_chat([{"role": "user", "content": "Hello"}])
        except RidgelineError:
            llm.close()
            raise
        assert llm.chat_template is not None
        self._name = name
        self._reasoning_parser = choose_reasoning_parser(llm.chat_template.source)
        self._params = SamplingParams(**{**llm.sampling_defaults, **self._given})
        error_console.print(llm.summary.line, style="dim", markup=False)
        return llm

    def greet(self, *, has_commands: bool) -> None:
        """Say how to go on, where there are commands, and what the embedded model is."""
        if has_commands:
            error_console.print(HELP, style="dim", markup=False)
        if self._name is None:
            error_console.print(_DEMONSTRATION, style="yellow")

    def status(self) -> str:
        """One line for the foot of the screen."""
        used = 0
        if self._last is not None:
            used = len(self._last.prompt_token_ids) + len(self._last.outputs[0].token_ids)
        line = f"{self._llm.name} · {used:,} of {self._llm.config.max_model_len:,} tokens"
        return f"{line} · {len(self._attached)} attached" if self._attached else line

    def command(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name not in COMMANDS:
            raise InvalidRequestError(f"There is no command {name}{suggestion(name, COMMANDS)}")
        if rest and name in ("/help", "/retry", "/undo", "/reset", "/stats", "/exit"):
            raise InvalidRequestError(f"{name} takes nothing after it.")
        if not rest and name in ("/file", "/save", "/load"):
            raise InvalidRequestError(f"{name} needs the path of a file.")
        action: Callable[..., None] = getattr(self, f"do_{name[1:]}")
        action(*([rest] if COMMANDS[name].startswith(("[", "PATH")) else []))

    def ask(self, question: str) -> bool:
        """Stream the answer to one turn; whether there was one, for which files were attached."""
        is_answered = self._answer("\n\n".join([*self._attached, question]))
        if is_answered:
            self._attached.clear()
        return is_answered

    def _answer(self, question: str) -> bool:
        """Show an answer while it comes; whether there was one, and so a turn more.

        Reasoning is no part of it: templates leave that of earlier turns out, too.
        """
        context = self._llm.config.max_model_len
        room = min(self._params.max_tokens or context, context // _ANSWER_SHARE)
        dropped = self.transcript.num_dropped
        prompt = self.transcript.prompt_for(question, self._llm.encode_chat, context - room)
        if new := self.transcript.num_dropped - dropped:
            turns = "the oldest turn" if new == 1 else f"the {new} oldest turns"
            error_console.print(
                f"The context of {context:,} tokens is full: {turns} left it. /save keeps all, "
                "/reset begins anew.",
                style="yellow",
            )
        before = draft_counts(self._llm.speculation())
        stream = self._llm.stream(prompt, self._sampling)
        parts: list[str] = []
        with _interrupts_close(stream), self._view() as view:
            for event in self._events(prompt, stream):
                if isinstance(event, Reasoning):
                    view.add_reasoning(event.text)
                elif isinstance(event, Content):
                    parts.append(event.text)
                    view.add(event.text)
        self._last = stream.output()
        self._drafts = draft_counts(self._llm.speculation()) - before
        self._output_tokens += len(self._last.outputs[0].token_ids)
        self._print_figures(self._last)
        if parts:
            self.transcript.add(question, "".join(parts))
        return bool(parts)

    @property
    def _sampling(self) -> SamplingParams:
        """With the special tokens of the output, where they tell reasoning from content."""
        if not reads_special_tokens(None, self._reasoning_parser):
            return self._params
        return dataclasses.replace(self._params, skip_special_tokens=False)

    def _events(self, prompt: list[int], stream: CompletionStream) -> Iterator[Event]:
        assert self._llm.tokenizer is not None
        parser = output_parser(
            tool_parser=None,
            reasoning_parser=self._reasoning_parser,
            tools=None,
            prompt=self._llm.tokenizer.decode(prompt, skip_special_tokens=False),
        )
        for chunk in stream:
            yield from parser.push(chunk.text)
        yield from parser.finish()

    def _view(self) -> AnswerView:
        console = Console(highlight=False, soft_wrap=True)
        shows_reasoning = self._arguments.show_reasoning
        if self._arguments.plain or not console.is_terminal:
            return PlainView(console, shows_reasoning=shows_reasoning)
        return MarkdownView(Console(highlight=False), shows_reasoning=shows_reasoning)

    def _print_figures(self, output: RequestOutput) -> None:
        if output.timings is not None:
            (sample,) = output.outputs
            line = timing_line(
                output.timings,
                prompt_tokens=len(output.prompt_token_ids),
                output_tokens=len(sample.token_ids),
                drafts=self._drafts,
            )
            stopped = " · stopped" if sample.finish_reason is FinishReason.ABORT else ""
            error_console.print(line + stopped, style="dim")
        if (warning := full_context_line(output, self._params.max_tokens)) is not None:
            error_console.print(warning, style="yellow", soft_wrap=True)

    def do_help(self) -> None:
        for name, text in COMMANDS.items():
            error_console.print(f"{name:8} {text}", style="dim", markup=False)
        error_console.print(_KEYS, style="dim", markup=False)

    def do_system(self, text: str) -> None:
        if text:
            self.transcript.system = None if text == "-" else text
        shown = self.transcript.system or "no system message"
        error_console.print(shown, style="dim", markup=False)

    def do_retry(self) -> None:
        turns, dropped = list(self.transcript.turns), self.transcript.num_dropped
        question, answered = self.transcript.undo(), False
        try:
            answered = self._answer(question)
        finally:
            if not answered:
                self.transcript.turns, self.transcript.num_dropped = turns, dropped

    def do_undo(self) -> None:
        question = self.transcript.undo()
        error_console.print(f"forgotten: {_shortened(question)}", style="dim", markup=False)

    def do_reset(self) -> None:
        self.transcript.reset()
        self._attached.clear()
        self._last = None
        error_console.print("forgotten", style="dim")

    def do_file(self, rest: str) -> None:
        name, question = _split_path(rest)
        path = Path(name)
        text = read_text(path)
        self._attached.append(quoted_file(path, text))
        if question:
            is_answered = False
            try:
                is_answered = self.ask(question)
            finally:
                if not is_answered:  # the same command can be given again
                    self._attached.pop()
        else:
            error_console.print(
                f"{path.name}, {len(text):,} characters, goes with the next question.",
                style="dim",
                markup=False,
            )

    def _num_turns(self) -> str:
        count = len(self.transcript.turns)
        return "1 turn" if count == 1 else f"{count} turns"

    def do_save(self, rest: str) -> None:
        path = Path(rest).expanduser()
        if path.exists():
            Transcript.load(path)  # overwrite nothing else
        elif not path.parent.is_dir():
            raise InvalidRequestError(f"There is no folder {path.parent}.")
        self.transcript.save(path)
        error_console.print(f"{path} has {self._num_turns()}.", style="dim", markup=False)

    def do_load(self, rest: str) -> None:
        self.transcript = Transcript.load(Path(rest).expanduser())
        self._last = None
        error_console.print(f"Read {self._num_turns()}.", style="dim")

    def do_set(self, rest: str) -> None:
        if not rest:
            for field in dataclasses.fields(SamplingParams):
                shown = getattr(self._params, field.name)
                error_console.print(f"{field.name} = {shown}", style="dim", markup=False)
            return
        name, _, text = rest.partition(" ")
        name = name.removesuffix("=").replace("-", "_")
        if name not in SamplingParams.__dataclass_fields__:
            known = SamplingParams.__dataclass_fields__
            raise InvalidRequestError(f"There is no setting {name!r}{suggestion(name, known)}")
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError):
            value = text.strip()
        if name == "n" and value != 1:
            raise InvalidRequestError("A chat has one answer to each turn; n must be 1.")
        self._params = dataclasses.replace(self._params, **{name: value})  # type: ignore[arg-type]
        self._given[name] = value
        shown = getattr(self._params, name)
        error_console.print(f"{name} = {shown}", style="dim", markup=False)

    def do_stats(self) -> None:
        turns = f"{self._num_turns()}, {self.transcript.num_dropped} dropped"
        error_console.print(f"{self.status()} · {turns}", style="dim")
        if self._last is not None:
            self._print_figures(self._last)
            line = f"{self._output_tokens:,} tokens written · {roofline_line(self._llm.roofline())}"
            error_console.print(line, style="dim", markup=False)

    def do_model(self, name: str) -> None:
        """Show the model, or load another; the conversation goes on with it."""
        if name:
            before = self._name
            settings = engine_settings(self._arguments)
            with loading_bar() as progress:  # what is no model leaves the one that is there
                described = describe_model(EngineConfig(model=name, **settings), progress=progress)
            if described.chat_template is None:
                raise ChatTemplateError(f"{name} has no chat template.")
            self._llm.close()  # first: two may not fit
            try:
                self._llm = self._opened(name)
            except BaseException:
                self._llm = self._opened(before)
                raise
        error_console.print(self.status(), style="dim", markup=False)


def _split_path(rest: str) -> tuple[str, str]:
    """A path, in quotes if it has spaces, and the text after it, which is as it is.

    Raises:
        InvalidRequestError: the quotes are not closed.
    """
    if rest[0] not in "'\"":
        path, *question = rest.split(maxsplit=1)
        return path, "".join(question)
    path, closing, question_text = rest[1:].partition(rest[0])
    if not closing:
        raise InvalidRequestError("The quotes around the path are not closed.")
    return path, question_text.strip()


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


@contextmanager
def _interrupts_close(stream: CompletionStream) -> Iterator[None]:
    """Ctrl-C ends the answer after the step that runs, instead of raising in the middle of it."""
    before = signal.signal(signal.SIGINT, lambda *_: stream.request_close())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
