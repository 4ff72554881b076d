"""Our tokenizer as llguidance takes it."""

from collections.abc import Sequence
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from ridgeline.core.errors import InvalidRequestError
from ridgeline.text import Tokenizer

# Sets of tokens whose masks are computed once: where any text of a string may follow, a mask is put
# together from them. The short ones are for strings that soon reach their greatest length.
_STRING_CHAR = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHAR}{{1,{most}}}" for most in (3, 5, 10, 30)),
    f"{_STRING_CHAR}+",
)
# SentencePiece puts a space before the start of a text; this takes that place.
_BEFORE = "\x02"
# Of a long text only so many characters are tokenized, as each step asks for what is left of it;
# and the last tokens of what is cut are left out, since what follows could change them.
_MOST_CHARS = 1024
_UNSETTLED = 8


class _Source:
    """What llguidance reads of a tokenizer, under the names that it uses."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        ids = range(vocab_size)  # those beyond the tokenizer's have no bytes, and are never allowed
        self.eos_token_id = eos_token_id
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(index) for index in ids]
        self.special_token_ids = [index for index in ids if tokenizer.is_special(index)]
        special = frozenset(self.special_token_ids)
        self._texts = {
            index: token
            for index, token in enumerate(self.tokens)
            if token and index not in special
        }
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """How a text is tokenized within an output; bytes are refused, so whole characters come.

        The longest tokens that fit, one after the other, where the usual ones are another text: a
        special token that the text spells, or a character that the vocabulary lacks. Only the
        beginning of a long text is tokenized.
        """
        if len(text) > _MOST_CHARS:
            ids = self(text[:_MOST_CHARS])
            return ids[: max(1, len(ids) - _UNSETTLED)]
        for before in ("", _BEFORE):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            if (found := self._last(ids, text.encode())) is not None:
                return found
        return self._longest(text.encode())

    def _last(self, ids: Sequence[int], text: bytes) -> list[int] | None:
        """The last of some tokens, those whose bytes are the text."""
        start, end = len(ids), len(text)
        while end > 0 and start > 0:
            start -= 1
            token = self._texts.get(ids[start])
            if token is None or not text.endswith(token, 0, end):
                return None
            end -= len(token)
        return None if end else list(ids[start:])

    def _longest(self, text: bytes) -> list[int]:
        by_bytes, most = self._by_bytes
        ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(start + most, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in by_bytes), None)
            if end is None:
                break
            ids.append(by_bytes[text[start:end]])
            start = end
        return ids

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, int], int]:
        """Tokens by their bytes, and the greatest number of bytes."""
        by_bytes = {token: index for index, token in self._texts.items()}
        return by_bytes, max(map(len, by_bytes), default=0)


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The bytes of every token. ``vocab_size`` is the width of the model's logits.

    Takes about a second for 128k tokens; the result serves all grammars.

    Raises:
        InvalidRequestError: the tokenizer has no token that ends an output.
    """
    eos = sorted(tokenizer.eos_token_ids)
    if not eos:
        raise InvalidRequestError(
            "Structured outputs need an end-of-sequence token, which this model's tokenizer lacks."
        )
    wrapper = TokenizerWrapper(_Source(tokenizer, vocab_size, eos[0]))
    return LLTokenizer(wrapper, eos_token=eos, slices=list(SLICES))
