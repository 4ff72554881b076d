"""Where the documents that a request marks are in its prompt."""

from collections.abc import Sequence

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.kv_reuse import Marked
from ridgeline.text import Tokenizer

_MOST_CUT = 2  # tokens at either end of a text that may be others within the prompt
_ELSEWHERE = chr(0x10FFFF)  # stands for all tokens that are not in the prompt


def find_segments(
    token_ids: Sequence[int], segments: Sequence[Marked], tokenizer: Tokenizer | None
) -> list[tuple[int, int]]:
    """Half-open ranges of the prompt's tokens, one for each document, none within another.

    A text is looked for by its tokens. At its ends these may be others in the prompt, where they
    depend on what stands beside: as many tokens are then left out there.

    Raises:
        InvalidRequestError: a document is not there, or there is no tokenizer for a text.
    """
    letters = {token: chr(number) for number, token in enumerate(dict.fromkeys(token_ids))}
    prompt = "".join(map(letters.__getitem__, token_ids))  # texts are searched in linear time
    taken = bytearray(len(prompt))
    found: list[tuple[int, int]] = []
    for number, marked in enumerate(segments):
        cuts = [(0, 0)]
        if isinstance(marked, str):
            if tokenizer is None:
                raise InvalidRequestError(
                    "This model has no tokenizer; give segments as token ids."
                )
            marked = tuple(tokenizer.encode(marked, add_special_tokens=False))
            ends = range(_MOST_CUT + 1)
            cuts = sorted(((a, b) for a in ends for b in ends), key=sum)
        wanted = "".join(letters.get(token, _ELSEWHERE) for token in marked)
        places = (_place(prompt, wanted[a : len(wanted) - b], taken) for a, b in cuts)
        place = next((each for each in places if each is not None), None)
        if place is None:
            raise InvalidRequestError(
                f"segments[{number}] is not in the prompt, or only within another of them: a "
                "document has to stand there as it is marked."
            )
        found.append(place)
        taken[slice(*place)] = b"\1" * (place[1] - place[0])
    return found


def _place(prompt: str, wanted: str, taken: bytearray) -> tuple[int, int] | None:
    """Where these tokens first are of which none is ``taken``."""
    at = prompt.find(wanted) if wanted else -1
    while at >= 0:
        stop = at + len(wanted)
        last = taken.rfind(1, at, stop)
        if last < 0:
            return at, stop
        at = prompt.find(wanted, last + 1)
    return None
