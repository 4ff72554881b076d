"""The grammar of one output, and where in it the output is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from ridgeline.core.protocols import Constraint

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

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def masks(self, drafts: Sequence[int]) -> npt.NDArray[np.uint32]:
        masks = np.full((1 + len(drafts), self._words), _ANY, dtype=np.uint32)
        words = masks.view(np.int32)
        consumed = 0
        for row in range(len(masks)):
            if self._matcher.is_error():
                masks[row] = 0
                self._use.has_failed = True
                break
            fill_next_token_bitmask(self._matcher, words, row)
            # What follows an end is cut off, whatever it is.
            if row == len(drafts) or drafts[row] in self._ends:
                break
            if self._matcher.try_consume_tokens([drafts[row]]) != 1:
                break
            consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return masks

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()
