"""A grammar in memory, which grows with what has been generated under it."""

from llguidance import LLMatcher, LLTokenizer

from ridgeline.core.protocols import Constraint
from ridgeline.decoding.grammars.constraint import GrammarConstraint, LexerUse

MAX_TOKENS = 1 << 14
_BYTES_PER_TOKEN = 4 << 10
_MAX_GROWN_BYTES = 8 << 20


class CompiledGrammar:
    """Makes the constraints of outputs, which share the states that their lexer has come to.

    Those states are only ever added to, up to a limit at which every output of the grammar fails.
    So a grammar that has had `MAX_TOKENS`, or failed, is worn, and to be compiled anew.

    Args:
        num_bytes: what it took when it was compiled.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, num_bytes: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_bytes = num_bytes
        self._use = LexerUse()

    def __call__(self) -> Constraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary, self._use)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, what was added since estimated from above."""
        return self._num_bytes + min(self._use.num_tokens * _BYTES_PER_TOKEN, _MAX_GROWN_BYTES)

    @property
    def is_worn(self) -> bool:
        return self._use.has_failed or self._use.num_tokens >= MAX_TOKENS
