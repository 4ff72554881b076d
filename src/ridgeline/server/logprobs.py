"""Log-probabilities in the two shapes that clients read."""

from collections.abc import Sequence
from typing import Any

from ridgeline.core.result import TokenLogprobs
from ridgeline.server.schemas.chat import ChosenLogprob, TokenLogprob
from ridgeline.server.schemas.completions import CompletionLogprobs
from ridgeline.text import Tokenizer


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The token as text; half a character is U+FFFD, and without a tokenizer it is its id."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class CompletionLogprobsWriter:
    """Makes the entries of one completion; ``text_offset`` goes on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def write(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        *,
        hides_special: bool,
    ) -> CompletionLogprobs:
        """``entries[i]`` is for ``token_ids[i]``, ``None`` for the first token of a text.

        ``hides_special``: special tokens are not in the text, and so take no room in it.
        """
        tokens = [token_text(self._tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for token_id, token in zip(token_ids, tokens, strict=True):
            offsets.append(self._offset)
            if not (hides_special and self._is_special(token_id)):
                self._offset += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if entry is None else entry.logprob for entry in entries],
            top_logprobs=[None if entry is None else self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and self._tokenizer.is_special(token_id)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Alternatives by their text; of those that share one, the likeliest."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(self._tokenizer, token_id), logprob)
        return top


def chat_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs]
) -> list[ChosenLogprob]:
    """One entry for each token of an answer."""
    return [
        ChosenLogprob(
            token=token_text(tokenizer, entry.token_id),
            logprob=entry.logprob,
            bytes=_bytes(tokenizer, entry.token_id),
            top_logprobs=[
                TokenLogprob(
                    token=token_text(tokenizer, token_id),
                    logprob=logprob,
                    bytes=_bytes(tokenizer, token_id),
                )
                for token_id, logprob in entry.top
            ],
        )
        for entry in entries
    ]


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """For each prompt token the alternatives by token id, as vLLM writes them."""
    if entries is None:
        return None
    return [None if entry is None else _by_id(tokenizer, entry) for entry in entries]


def _by_id(tokenizer: Tokenizer | None, entry: TokenLogprobs) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    chosen = (entry.token_id, entry.logprob, entry.rank)
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": token_text(tokenizer, token_id),
        }
        for token_id, logprob, rank in (*ranked, chosen)
    }


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> list[int] | None:
    return None if tokenizer is None else list(tokenizer.token_bytes(token_id))
