"""Our tokenizer as llguidance takes it."""

from collections.abc import Sequence

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


class _Source:
    """What llguidance reads of a tokenizer, under the names that it uses."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        ids = range(vocab_size)  # those beyond the tokenizer's have no bytes, and are never allowed
        self.eos_token_id = eos_token_id
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(index) for index in ids]
        self.special_token_ids = [index for index in ids if tokenizer.is_special(index)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """How a text is tokenized; bytes are refused, so that only whole characters come."""
        return self._tokenizer.encode(text, add_special_tokens=False)


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
