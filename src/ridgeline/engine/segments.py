"""Where the documents that a request marks are in its prompt."""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.kv_reuse import Marked
from ridgeline.text import Tokenizer

_MOST_CUT = 2  # tokens at either end of a text that may be others within the prompt
_TOKEN_BYTES = 4


def find_segments(
    token_ids: Sequence[int], segments: Sequence[Marked], tokenizer: Tokenizer | None
) -> list[tuple[int, int]]:
    """Half-open ranges of the prompt's tokens, one for each document, none within another.

    A text is looked for by its tokens. At its ends these may be others in the prompt, where they
    depend on what stands beside: as many tokens are then left out there.

    Raises:
        InvalidRequestError: a document is not there, or there is no tokenizer for a text.
    """
    prompt = np.array(token_ids, dtype=np.uint32).tobytes()
    found: list[tuple[int, int]] = []
    for number, marked in enumerate(segments):
        cuts = [(0, 0)]
        tokens = marked
        if isinstance(marked, str):
            if tokenizer is None:
                raise InvalidRequestError(
                    "This model has no tokenizer; give segments as token ids."
                )
            tokens = tuple(tokenizer.encode(marked, add_special_tokens=False))
            ends = range(_MOST_CUT + 1)
            cuts = sorted(((a, b) for a in ends for b in ends), key=sum)
        places = (_place(prompt, tokens[a : len(tokens) - b], found) for a, b in cuts)
        place = next((each for each in places if each is not None), None)
        if place is None:
            raise InvalidRequestError(
                f"segments[{number}] is not in the prompt, or only within another of them: a "
                "document has to stand there as it is marked."
            )
        found.append(place)
    return found


def _place(
    prompt: bytes, tokens: Sequence[int | str], taken: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Where these tokens first are that is not ``taken``."""
    wanted = np.array(tokens, dtype=np.uint32).tobytes()
    at = prompt.find(wanted) if wanted else -1
    while at >= 0:
        start, beside = divmod(at, _TOKEN_BYTES)
        stop = start + len(tokens)
        if not beside and all(stop <= first or last <= start for first, last in taken):
            return start, stop
        at = prompt.find(wanted, at + 1)
    return None
