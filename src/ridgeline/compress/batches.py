"""Batches of packed text as a pure function of (seed, batch number): resuming needs no state."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDocument:
    """Token ids of one document; the first is ``<|endoftext|>``."""

    kind: str
    path: str
    ids: Ids


def _copies(document: EncodedDocument, weight: float) -> int:
    """``weight`` rounded up or down, by a hash of the path, so that the mean is ``weight``."""
    whole = int(weight)
    digest = hashlib.sha256(b"copies" + document.path.encode()).digest()
    return whole + (int.from_bytes(digest[:4], "big") < (weight - whole) * 2**32)


def pack(*, documents: Sequence[EncodedDocument], weights: Mapping[str, float], seed: int) -> Ids:
    """One epoch of text: documents repeated by the weight of their kind, shuffled, joined."""
    parts = [
        document.ids
        for document in documents
        for _ in range(_copies(document, weights.get(document.kind, 0.0)))
    ]
    order = np.random.default_rng(seed).permutation(len(parts))
    return np.concatenate([parts[i] for i in order])


class BatchStream(Protocol):
    """What a loop trains on: batches by their number."""

    length_tokens: int

    def batch(self, *, number: int, num_windows: int) -> tuple[Tensor, Tensor]:
        """Batch ``number``, as the loss takes it."""
        ...


class WindowStream:
    """Shuffled windows of packed text; every window is seen once per epoch."""

    def __init__(self, *, ids: Ids, length_tokens: int, seed: int) -> None:
        self.ids = ids
        self.length_tokens = length_tokens
        self.seed = seed
        self._epoch, self._epoch_order = -1, np.empty(0, dtype=np.int64)
        self.num_windows = (len(ids) - 1) // length_tokens
        if self.num_windows < 1:
            raise ValueError(f"the text has {len(ids)} tokens, a window needs {length_tokens + 1}")

    def window(self, index: int) -> Ids:
        """Window number ``index`` of the endless stream: ``length_tokens`` + 1 ids."""
        epoch, place = divmod(index, self.num_windows)
        start = int(self._order(epoch)[place]) * self.length_tokens
        return self.ids[start : start + self.length_tokens + 1]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, epoch))
            self._epoch, self._epoch_order = epoch, random.permutation(self.num_windows)
        return self._epoch_order

    def batch(self, *, number: int, num_windows: int) -> tuple[Tensor, Tensor]:
        """Batch ``number``: inputs and next tokens, each [num_windows, length_tokens] int64."""
        first = number * num_windows
        rows = [self.window(first + i).astype(np.int64) for i in range(num_windows)]
        ids = torch.from_numpy(np.stack(rows))
        return ids[:, :-1], ids[:, 1:]
