"""The grammar of one output, and where in it the output is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from ridgeline.core.protocols import Constraint
from ridgeline.decoding.verification import chain

_ANY = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class LexerUse:
    """What the outputs of one grammar have done to the lexer that they share."""

    num_tokens: int = 0
    has_failed: bool = False


class GrammarConstraint(Constraint):
    """Owns ``matcher``. After a token that the grammar does not allow, no token is allowed."""

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, use: LexerUse) -> None:
        self._matcher = matcher
        self._use = use
        self._ends = frozenset(vocabulary.eos_tokens)
        self._words = (vocabulary.vocab_size + 31) // 32

    def advance(self, token_ids: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(token_ids))
        self._use.num_tokens += len(token_ids)

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """The usual tokens of the bytes that must follow.

        The last ones are left out where the text that comes after could change them.
        """
        if max_tokens <= 0 or self._matcher.is_stopped():
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:max_tokens])

    def valid(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> tuple[int, ...]:
        return tuple(sorted(node for node in self._walk(token_ids, parents) if node >= 0))

    def masks(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> npt.NDArray[np.uint32]:
        masks = np.full((1 + len(drafts), self._words), _ANY, dtype=np.uint32)
        words = masks.view(np.int32)
        for node in self._walk(drafts, parents):
            if self._matcher.is_error():
                masks[node + 1] = 0
                self._use.has_failed = True
            elif node < 0 or drafts[node] not in self._ends:  # what follows an end is cut off
                fill_next_token_bitmask(self._matcher, words, node + 1)
        return masks

    def _walk(self, drafts: Sequence[int], parents: Sequence[int]) -> Iterator[int]:
        """−1 and the drafts that are allowed, depth first; the matcher is behind each, but an end.

        The matcher is back where it was once all are through.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents or chain(len(drafts))):
            children.setdefault(parent, []).append(node)
        pending, consumed = [(-1, 0)], 0
        while pending:
            node, depth = pending.pop()
            if node >= 0:
                if consumed >= depth:
                    self._matcher.rollback(consumed - depth + 1)
                    consumed = depth - 1
                if drafts[node] in self._ends:
                    if self._matcher.validate_tokens([drafts[node]]):
                        yield node
                    continue
                if self._matcher.try_consume_tokens([drafts[node]]) != 1:
                    continue
                consumed = depth
            yield node
            pending += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        if consumed:
            self._matcher.rollback(consumed)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()
