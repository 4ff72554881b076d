"""Drops text that is there twice, and text that repeats what is held out."""

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from recipes.embedded.corpus import Document

WORDS = 12  # a run of as many words that two texts share is no chance
MAX_SHARED_RUNS = 30
MAX_SHARED_PART = 0.05
_WORD = re.compile(r"\w+")


def _runs(text: str) -> npt.NDArray[np.uint64]:
    """A hash of each run of ``WORDS`` words."""
    words = np.fromiter((zlib.crc32(w.encode()) for w in _WORD.findall(text)), dtype=np.uint64)
    total = np.zeros(max(0, len(words) - WORDS + 1), dtype=np.uint64)
    for i in range(WORDS if len(total) else 0):
        total = total * np.uint64(0x9E3779B97F4A7C15) + words[i : i + len(total)]
    return total


def without_repetitions(
    documents: Iterable[Document], *, held_out: Iterable[Document]
) -> Iterator[Document]:
    """Each text once, without those that share more than 30 runs, or 5%, with the held-out ones.

    White space does not count in telling whether two texts are equal.
    """
    known = np.unique(np.concatenate([_runs(document.text) for document in held_out]))
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.sha256("".join(document.text.split()).encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        runs = _runs(document.text)
        shared = int(np.count_nonzero(np.isin(runs, known)))
        if shared <= min(MAX_SHARED_RUNS, MAX_SHARED_PART * len(runs)):
            yield document
