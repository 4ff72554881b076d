"""Documents in a prompt whose K and V are those that they have by themselves."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from ridgeline.core.checks import check_int
from ridgeline.core.errors import InvalidRequestError

SegmentReuse = int | Literal["all"]  # tokens at the start of a document that are computed
Marked = str | tuple[int, ...]  # a document as text, or as tokens

MAX_SEGMENTS = 1024
_MAX_TOKENS = 2**31 - 1


class ReusedRange(NamedTuple):
    """Positions ``[start, stop)`` of a prompt, whose K and V are taken from those of a document.

    The document is the prompt's tokens ``[first, stop)``, which are whole blocks, computed by
    themselves from position 0 on.
    """

    first: int
    start: int
    stop: int


class KVReuse(NamedTuple):
    """In a plan: where the K and V of a `ReusedRange` are.

    ``blocks[g]`` has the document's KV of group g from its position 0 on, of which
    ``[start - first, stop - first)`` are taken. Keys are turned from their own positions to
    ``[start, stop)`` and stored once more, with the values or without; at distance 0 all is copied
    as it is stored.
    """

    first: int
    start: int
    stop: int
    blocks: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def read_segments(given: object) -> tuple[Marked, ...]:
    """What a request marks as documents: texts, or lists of token ids.

    Raises:
        InvalidRequestError: it is something else, or too much.
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or len(given) > MAX_SEGMENTS:
        raise InvalidRequestError(f"segments must be a list of at most {MAX_SEGMENTS} documents.")
    found: list[Marked] = []
    for each in given:
        if isinstance(each, str) and each:
            found.append(each)
        elif isinstance(each, list | tuple) and each:
            for token in each:
                check_int("segments token id", token, 0, _MAX_TOKENS)
            found.append(tuple(each))
        else:
            raise InvalidRequestError("Each of segments must be a text or a list of token ids.")
    return tuple(found)


def check_reuse(reuse: object) -> None:
    """
    Raises:
        InvalidRequestError: it is no number of tokens, and not "all".
    """
    if reuse != "all":
        check_int('segment_reuse (a number of tokens, or "all")', reuse, 0, _MAX_TOKENS)


def reused_ranges(
    documents: Iterable[tuple[int, int]],
    reuse: SegmentReuse,
    *,
    num_prompt_tokens: int,
    block_tokens: int,
) -> tuple[ReusedRange, ...]:
    """What is taken of documents at these half-open ranges of a prompt, in their order there.

    Of each the first ``reuse`` tokens are computed, and what is behind its last whole block; and of
    the prompt the last token. Recomputing the first tokens is what EPIC does (arXiv 2410.15332):
    those of a text by itself draw the attention of all that follow.
    """
    if reuse == "all":
        return ()
    ranges = []
    for first, last in sorted(documents):
        whole = (min(last, num_prompt_tokens - 1) - first) // block_tokens * block_tokens
        if whole > reuse:
            ranges.append(ReusedRange(first, first + reuse, first + whole))
    return tuple(ranges)
