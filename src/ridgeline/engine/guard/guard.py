"""`Guard`: asks a scorer in a child process, and stands in for it where it fails."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ridgeline.core.child_process import ChildProcess
from ridgeline.core.errors import SettingsError
from ridgeline.engine.guard import worker
from ridgeline.engine.guard.config import GuardConfig
from ridgeline.engine.guard.scorer import Decision, End, Release
from ridgeline.engine.guard.word_list import WordList
from ridgeline.engine.guard.worker import Answer, Kind, NoDecision, Questions, Ready, See

_log = logging.getLogger(__name__)

PATTERN_WINDOW_CHARS = 64
_START_S = 120.0  # in which a scorer must be made
_MAX_BATCH = 32
_SLACK_S = 1.0  # beyond the child's own timer
_ANSWERS = msgspec.msgpack.Decoder(Answer | Ready)


class Judged:
    """The text of one sample, and how much of it which child has seen."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.seen_by = 0  # 0 is none
        self.seen_chars = 0


class _Question:
    def __init__(self, sample: Judged, final: bool) -> None:
        self.sample = sample
        self.final = final
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class Guard:
    """Answers for all outputs of a server, in one event loop.

    ``observe`` is told the kind of each decision and the seconds that it took.

    Raises:
        SettingsError: the word list cannot be read.
    """

    def __init__(self, config: GuardConfig, observe: Callable[[str, float], None]) -> None:
        self.config = config
        kind: Kind = "list" if config.word_list is not None else "python"
        name = config.word_list or config.scorer or ""
        has_patterns = config.word_list is not None and WordList.read(name).has_patterns
        default = PATTERN_WINDOW_CHARS if has_patterns else 0
        self.window_chars = default if config.window_chars is None else config.window_chars
        self._name = name
        self._observe = observe
        self._child = ChildProcess(
            ["-P", "-m", worker.__name__, str(config.timeout_s), kind, name], shows_errors=True
        )
        self._children = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-guard")
        self._numbers = itertools.count()
        self._waiting: list[_Question] = []
        self._forgotten: list[int] = []
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the scorer now rather than with the first output.

        Raises:
            SettingsError: it cannot be made.
        """
        loop = asyncio.get_running_loop()
        problem = await loop.run_in_executor(self._thread, self._ready)
        if problem is not None:
            raise SettingsError(f"The scorer {self._name!r} cannot be used: {problem}")

    def open(self) -> Judged:
        """A new sample, to be given back by `close_sample`."""
        return Judged(next(self._numbers))

    def close_sample(self, sample: Judged) -> None:
        self._forgotten.append(sample.number)

    async def see(self, sample: Judged, *, final: bool) -> Decision:
        """What becomes of a sample's text; never raises."""
        started_s = time.monotonic()
        question = _Question(sample, final)
        self._waiting.append(question)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        answer = await question.answer
        kind = "failed" if isinstance(answer, NoDecision) else type(answer).__name__.lower()
        self._observe(kind, time.monotonic() - started_s)
        if not isinstance(answer, NoDecision):
            return answer
        _log.warning("The scorer failed: %s", answer.problem)
        if self.config.on_failure == "release":
            return Release(len(sample.text))
        return End("guard_failed")

    def close(self) -> None:
        """End the child; nothing may be asked any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._child.close()

    async def _ask_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            # Who has left is not asked of: the child would keep a text that it was told to forget.
            self._waiting = [each for each in self._waiting if not each.answer.done()]
            batch = self._waiting[:_MAX_BATCH]
            forgotten, self._forgotten = self._forgotten, []
            try:
                answers = await loop.run_in_executor(self._thread, self._ask, batch, forgotten)
            except (OSError, RuntimeError, msgspec.MsgspecError) as error:  # also while we close
                answers = [NoDecision(str(error)) for _ in batch]
            del self._waiting[: len(answers)]
            for question, answer in zip(batch, answers, strict=False):
                if not question.answer.done():
                    question.answer.set_result(answer)

    def _ready(self) -> str | None:
        """Start a child if there is none; returns what is wrong with it."""
        if self._child.is_running:
            return None
        self._children += 1
        hello = msgspec.msgpack.encode(Questions([], []))
        replies = self._child.exchange(hello, wall_seconds=_START_S)
        answer = _ANSWERS.decode(replies[0]) if replies else NoDecision("Its process ended.")
        if isinstance(answer, NoDecision):
            self._child.close()
            return answer.problem
        return None

    def _ask(self, batch: list[_Question], forgotten: list[int]) -> list[Answer]:
        """Answers to the first of a batch, one at least: the last of them may have ended the child,
        and what follows it is not to blame."""
        problem = self._ready()
        if problem is not None:
            return [NoDecision(problem) for _ in batch]
        request = msgspec.msgpack.encode(
            Questions([self._see(each.sample, each.final) for each in batch], forgotten)
        )
        replies = self._child.exchange(
            request,
            wall_seconds=self.config.timeout_s * len(batch) + _SLACK_S,
            num_replies=len(batch),
        )
        answers = [_ANSWERS.decode(reply) for reply in replies]
        if len(answers) < len(batch):
            answers.append(NoDecision("It took too long, or its process ended."))
        for each, _ in zip(batch, answers, strict=False):  # nobody has seen the texts of the rest
            each.sample.seen_by, each.sample.seen_chars = self._children, len(each.sample.text)
        return answers

    def _see(self, sample: Judged, final: bool) -> See:
        is_known = sample.seen_by == self._children
        before = None if is_known else sample.text[: sample.seen_chars]
        new = sample.text[sample.seen_chars :]
        return See(sample.number, before, new, final)
