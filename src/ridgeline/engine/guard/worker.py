"""The process of a scorer, so that it can be stopped whatever it does.

``python -m ridgeline.engine.guard.worker SECONDS KIND NAME``: frames of msgpack on standard input
and output (see `core.child_process`). What the scorer itself prints goes to standard error. The
first reply says whether it could be made.
"""

import os
import signal
import sys
from importlib import import_module
from typing import BinaryIO, Literal

import msgspec

from ridgeline.core.errors import SettingsError
from ridgeline.core.parts import load_part
from ridgeline.engine.guard.scorer import Decision, Scorer
from ridgeline.engine.guard.word_list import WordList

Kind = Literal["list", "python"]


class See(msgspec.Struct, frozen=True, array_like=True):
    """What is new of a sample; ``before`` is the text so far for a process that has not seen it."""

    sample: int
    before: str | None
    new: str
    final: bool


class Questions(msgspec.Struct, frozen=True, array_like=True):
    """Each of ``see`` gets a reply of its own, in order; samples of ``forget`` have ended."""

    see: list[See]
    forget: list[int]


class NoDecision(msgspec.Struct, frozen=True, tag=True):
    """There is no decision, or no scorer."""

    problem: str


Answer = Decision | NoDecision


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The scorer was made."""


def load_scorer(kind: Kind, name: str) -> Scorer:
    """The scorer of a word list, or what the factory ``module:name`` or an entry point gives.

    Raises whatever the factory raises, and what is raised where there is none.
    """
    if kind == "list":
        return WordList.read(name)
    sys.path.append(os.getcwd())
    module, colon, attribute = name.partition(":")
    if colon:
        factory = getattr(import_module(module), attribute)
    else:
        factory = load_part("scorers", name)
        if factory is None:
            raise SettingsError("no package brings a part of that name.")
    scorer: Scorer = factory()
    if not callable(getattr(scorer, "see", None)):
        raise SettingsError("what it makes has no method see.")
    return scorer


class _Judge:
    """Keeps the texts of the samples that are open, and asks the scorer of each."""

    def __init__(self, scorer: Scorer, seconds: float) -> None:
        self._scorer = scorer
        self._seconds = seconds
        self._texts: dict[int, str] = {}

    def forget(self, samples: list[int]) -> None:
        for sample in samples:
            self._texts.pop(sample, None)

    def answer(self, see: See) -> Answer:
        text = self._texts.pop(see.sample, "") if see.before is None else see.before
        text += see.new
        if not see.final:
            self._texts[see.sample] = text
        _set_timer(self._seconds)
        try:
            decision = self._scorer.see(text, see.new, see.final)
            return msgspec.convert(decision, Decision)  # type: ignore[no-any-return]
        except msgspec.ValidationError:
            return NoDecision("It answered with something else than a decision.")
        except Exception as error:  # its message may quote the text
            return NoDecision(type(error).__name__)
        finally:
            _set_timer(0)


def _set_timer(seconds: float) -> None:
    """End the process, by SIGALRM's default action, after so long; 0 stops the timer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _send(replies: BinaryIO, reply: Answer | Ready) -> None:
    data = msgspec.msgpack.encode(reply)
    replies.write(len(data).to_bytes(4, "little") + data)
    replies.flush()


def main(seconds: float, kind: Kind, name: str) -> None:
    """Answer batches until there are no more."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    decoder = msgspec.msgpack.Decoder(Questions)
    judge: _Judge | None = None
    while len(header := sys.stdin.buffer.read(4)) == 4:
        batch = decoder.decode(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        if judge is None:
            try:
                judge = _Judge(load_scorer(kind, name), seconds)
            except Exception as error:
                _send(replies, NoDecision(f"{type(error).__name__}: {error}"))
                return
            _send(replies, Ready())
            continue
        judge.forget(batch.forget)
        for see in batch.see:
            _send(replies, judge.answer(see))


if __name__ == "__main__":
    main(float(sys.argv[1]), msgspec.convert(sys.argv[2], Kind), sys.argv[3])
