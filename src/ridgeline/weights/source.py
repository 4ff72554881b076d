"""Where a model's weights come from: read one after the other, so that no two copies are held."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ridgeline.core.ops import Op
from ridgeline.models import TensorSource
from ridgeline.quant import Scheme
from ridgeline.weights.digest import content_digest, weight_files
from ridgeline.weights.dummy import stream_dummy_weights
from ridgeline.weights.gguf.shards import part_names
from ridgeline.weights.loading import stream_weights
from ridgeline.weights.packed import Weight, expanded, stream_packed_weights
from ridgeline.weights.progress import Progress


class WeightSource(Protocol):
    """Weights by canonical name. A dictionary of tensors is one."""

    def items(self) -> Iterable[tuple[str, Weight]]:
        """Every weight once, in any order; those of a file are read anew by each call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights of a folder or GGUF file, as `stream_packed_weights` yields them.

    ``items`` raises what that raises, before it yields anything unless a file fails later.
    """

    path: Path
    ops: Sequence[Op]
    sources: Mapping[str, TensorSource]
    ignored: Sequence[str]
    dtype: torch.dtype
    quantization: Scheme | None = None
    progress: Progress | None = None

    def items(self) -> Iterator[tuple[str, Weight]]:
        # Stacks of plain tensors are filled in place by the one, and need twice the memory by the
        # other.
        plain = self.quantization is None and self.path.is_dir()
        arguments = {field: getattr(self, field) for field in self.__slots__ if field != "path"}
        return (stream_weights if plain else stream_packed_weights)(self.path, **arguments)

    def num_bytes(self) -> int:
        """Bytes of the files; 0 for what cannot be read."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self._files())
        return 0

    def digest(self, *, memory: Path | None = None) -> str:
        """Names all that decides what ``items`` yields; for ``memory`` see `content_digest`.

        Raises:
            DiskError: a file cannot be read.
        """
        content = content_digest(self._files(), memory=memory)
        # The scheme is the config's, which is one of the files.
        meaning = (self.ops, sorted(self.sources.items()), self.dtype, self.quantization is None)
        return hashlib.sha256(repr((content, meaning)).encode()).hexdigest()

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return weight_files(self.path)
        return [self.path.parent / name for name in part_names(self.path.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyWeights:
    """Random weights, made on ``device``; see `dummy_weights`."""

    ops: Sequence[Op]
    dtype: torch.dtype
    seed: int
    device: torch.device | None = field(default=None, repr=False)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return stream_dummy_weights(self.ops, dtype=self.dtype, seed=self.seed, device=self.device)

    def digest(self) -> str:
        """Names all that decides what ``items`` yields."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def expanded_weights(source: WeightSource, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights as values, quantized ones expanded to ``dtype``."""
    return {name: expanded(weight, dtype) for name, weight in source.items()}
