"""Compiling grammars within limits, and remembering those that were used last."""

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ridgeline.core.errors import InvalidRequestError, OverloadedError
from ridgeline.core.protocols import ConstraintFactory, Grammar
from ridgeline.core.structured_outputs import GrammarKind, StructuredOutputs
from ridgeline.decoding.grammars.checker import CPU_SECONDS, GrammarChecker

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from ridgeline.decoding.grammars.compiled import CompiledGrammar

_Key = tuple[str, StructuredOutputs]  # a tenant, and what it wants
MAX_GRAMMARS = 128
KEPT_BYTES = 128 << 20
LIVE_BYTES = 512 << 20  # with those that are kept no more, of requests that run or wait
MAX_PATTERN_CHARS = 4096
MAX_MESSAGE_CHARS = 300
# llguidance counts work as fuel, so that the limits hold on any machine.
LIMITS = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}


class GrammarCompiler(ConstraintFactory):
    """Compiles by llguidance what a process of `GrammarChecker` has compiled first.

    ``vocabulary`` is made when the first grammar comes; ``special`` are the ids of its special
    tokens by their text. Equal grammars of a tenant are compiled once, even if they come at the
    same time; of those that were used last `MAX_GRAMMARS` are kept, and `KEPT_BYTES`. Tenants share
    none: a schema that takes no time to compile would say that another has sent it.
    """

    def __init__(
        self, vocabulary: "Callable[[], LLTokenizer]", special: Mapping[str, int] | None = None
    ) -> None:
        self._make_vocabulary = vocabulary
        self._special = dict(special or {})
        self._checker = GrammarChecker(tuple(self._special), LIMITS)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[_Key, Future[CompiledGrammar]] = OrderedDict()
        self._live: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self._lock = threading.Lock()

    def is_prepared(self, wanted: StructuredOutputs, tenant: str = "") -> bool:
        known = self._compiled.get((tenant, wanted))
        return known is not None and known.done() and not _is_worn(known)

    def prepare(self, wanted: StructuredOutputs, tenant: str = "") -> Grammar:
        key = tenant, wanted
        with self._lock:
            known = self._compiled.get(key)
            future: Future[CompiledGrammar] = Future()
            if known is not None and not _is_worn(known):
                future = known
            self._compiled[key] = future
            self._compiled.move_to_end(key)
        if future is not known:
            try:
                future.set_result(self._compile(wanted))
            except BaseException as error:
                self._forget(key, future)
                future.set_exception(error)
            else:
                self._shrink()
        return future.result()

    def delete_tenant(self, tenant: str) -> None:
        with self._lock:
            for key in [key for key in self._compiled if key[0] == tenant]:
                del self._compiled[key]

    def close(self) -> None:
        """End the processes that try grammars."""
        self._checker.close()

    @property
    def num_kept(self) -> int:
        """Grammars in memory."""
        return len(self._compiled)

    @property
    def kept_bytes(self) -> int:
        """What they take."""
        return sum(each.result().num_bytes for each in self._compiled.values() if _is_there(each))

    def _shrink(self) -> None:
        """Forget those that were used longest ago, but not the last."""
        with self._lock:
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_GRAMMARS or self.kept_bytes > KEPT_BYTES
            ):
                self._compiled.popitem(last=False)

    def _check_room(self, num_bytes: int) -> None:
        with self._lock:
            live = sum(each.num_bytes for each in self._live)
        if live + num_bytes > LIVE_BYTES:
            raise OverloadedError(
                "The grammars of the requests in progress take all the memory that they may.",
                retry_after_s=CPU_SECONDS,
            )

    def _forget(self, key: _Key, future: "Future[CompiledGrammar]") -> None:
        with self._lock:
            if self._compiled.get(key) is future:
                del self._compiled[key]

    def _compile(self, wanted: StructuredOutputs) -> "CompiledGrammar":
        """Most of the time the GIL is not held.

        What is imported is so with the first grammar, which most runs never have.
        """
        from llguidance import LLMatcher, LLParserLimits

        from ridgeline.decoding.grammars.compiled import CompiledGrammar
        from ridgeline.decoding.grammars.sources import grammar_source

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            vocabulary = self._vocabulary
        _check_patterns(wanted)
        try:
            source = grammar_source(wanted, self._special)
            tried = source
            if wanted.kind is GrammarKind.PARTS:  # which names tokens by their ids
                tried = grammar_source(wanted, self._checker.special)
        except ValueError as error:
            raise _refusal(wanted, str(error)) from error
        problem, num_bytes = self._checker.tried(tried)
        if problem:
            raise _refusal(wanted, problem)
        self._check_room(num_bytes)
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(wanted, matcher.get_error())
        compiled = CompiledGrammar(matcher, vocabulary, num_bytes)
        with self._lock:
            self._live.add(compiled)
        return compiled


def _is_there(grammar: "Future[CompiledGrammar]") -> bool:
    return grammar.done() and grammar.exception() is None


def _is_worn(grammar: "Future[CompiledGrammar]") -> bool:
    return _is_there(grammar) and grammar.result().is_worn


def _check_patterns(wanted: StructuredOutputs) -> None:
    """The work on one pattern grows faster than its length."""
    pattern = wanted.source if wanted.kind is GrammarKind.REGEX else ""
    if wanted.kind in (GrammarKind.JSON, GrammarKind.PARTS):
        found = re.findall(r'"pattern": "((?:[^"\\]|\\.)*)"', wanted.source)
        pattern = max(found, key=len, default="")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequestError(f"A pattern may have {MAX_PATTERN_CHARS} characters at most.")


def _refusal(wanted: StructuredOutputs, reason: str) -> InvalidRequestError:
    """What llguidance says, without the lines that show where."""
    said, *more = reason.strip().splitlines() or ["it cannot be used"]
    causes = [line.removeprefix("error:") for line in more if line.startswith("error:")]
    said = said[:MAX_MESSAGE_CHARS] + "".join(causes)[:MAX_MESSAGE_CHARS]
    if said.startswith("Unimplemented keys"):
        from ridgeline.decoding.grammars.schema_document import OPTION

        said = f"{said} cannot be enforced; {OPTION}"
    if said == "NoExtensionBias":  # why llguidance stops where no token may follow
        said = "no text matches it."
    return InvalidRequestError(f"structured_outputs.{wanted.kind} was refused: {said}")
