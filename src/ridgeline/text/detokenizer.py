"""Text from a growing sequence of tokens, a piece at a time."""

from collections.abc import Sequence

from ridgeline.text.decoding_stages import Stage
from ridgeline.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 16


class IncrementalDetokenizer:
    """Detokenizes one sequence as it grows; not thread-safe.

    The deltas of ``push`` and the rest from ``finish``, joined, equal ``tokenizer.decode`` of all
    the ids, also where the bytes are not UTF-8. Nothing that has been returned is ever taken back:
    half a UTF-8 character is held, and so is a run of byte-fallback tokens (its text is settled
    only when the run ends). Each token costs O(length of the token), amortised.

    ``context_ids``: the tokens before the first pushed one, of which the last 16 are used. Without
    them the first token is the start of a text, where SentencePiece decoders drop a space; with
    them it continues a text (a completion of a raw prompt wants this). Their text is not returned,
    save for a character that they begin and the first pushed tokens complete; a skipped special
    token ends it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stages: list[Stage] = tokenizer.decoder.stages()
        self._only_stage = self._stages[0] if len(self._stages) == 1 else None
        self._finished = False
        self._read_context(context_ids[-_CONTEXT_TOKENS:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that they settle (often empty).

        Ids that the vocabulary does not have stand for no text, as in ``decode``.
        """
        assert not self._finished, "push after finish"
        pieces: list[str] = []
        for token_id in token_ids:
            token = self._tokenizer.shown_token(token_id, skip_special=self._skip)
            if token is None:
                continue
            if self._only_stage is not None:
                pieces.extend(self._only_stage.feed(token))
            else:
                pieces.extend(_run(self._stages, (token,)))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character give U+FFFD."""
        assert not self._finished, "finish twice"
        self._finished = True
        pieces: list[str] = []
        for index, stage in enumerate(self._stages):
            pieces.extend(_run(self._stages[index + 1 :], stage.end()))
        return "".join(pieces)

    def _read_context(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._tokenizer.shown_token(token_id, skip_special=self._skip) is None:
                self._settle(keeps_half=False)
            else:
                self.push((token_id,))
        self._settle(keeps_half=True)

    def _settle(self, *, keeps_half: bool) -> None:
        """Drop what the stages hold back, after the later ones have seen it."""
        for index, stage in enumerate(self._stages):
            _run(self._stages[index + 1 :], stage.settle(keeps_half=keeps_half))


def _run(stages: Sequence[Stage], items: Sequence[str]) -> Sequence[str]:
    for stage in stages:
        if not items:
            break
        items = [out for item in items for out in stage.feed(item)]
    return items
