"""A GGUF model seen as a checkpoint: tensors by name, as Hugging Face's layout has their values.

What converters changed is undone row by row: interleaved heads (llama), norms stored plus one
(Gemma), and of states the decay, stored as −exp of its logarithm, and vectors, stored as matrices.
Of latent attention the parts for K and V are joined. Everything else is only expanded.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array, empty
from ridgeline.core.errors import CorruptFileError
from ridgeline.quant.gguf_tensor import GGUFBlocks, expand_rows
from ridgeline.weights.gguf.file import GGUFFile
from ridgeline.weights.gguf.names import ARCHITECTURES, interleaved_rows, tiled_rows
from ridgeline.weights.gguf.shards import open_parts
from ridgeline.weights.gguf.values import Metadata
from ridgeline.weights.names import short_name

_CHUNK_BYTES = 4 << 20
_DECAY = ".ssm_a"
_OF_HEADS = ("ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt")  # a row for each value head
_OF_VALUES = ("attn_gate", "attn_qkv", "ssm_conv1d")  # the last rows are those of value heads
_VALUES_READ = ".ssm_out.weight"  # its columns are of value heads
_ONE_BELOW_THE_OTHER = ("altup_proj.weight", "altup_unembd_proj.weight")  # stored as stacks
_VECTORS = (_DECAY, ".ssm_d", ".ssm_norm.weight")  # as they are used


class GGUFCheckpoint:
    """The tensors of a GGUF file and of the parts that belong to it. The same face as `Checkpoint`.

    Raises:
        ModelNotFoundError, CorruptFileError, UnsupportedModelError, DiskError: as `GGUFFile` and
            `open_parts`.
    """

    spare: frozenset[str] = frozenset()  # all tensors are somebody's

    def __init__(self, path: Path) -> None:
        self.folder = path
        self._files = open_parts(path)
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self.metadata: Metadata = self._files[0].metadata
        architecture = self.metadata.get("general.architecture")
        self._architecture = ARCHITECTURES.get(str(architecture))
        self._halves: dict[str, tuple[str, str]] = {}
        self._halves = self._halves_of_kv_b()
        self._value_heads = self._tiled_heads(str(architecture))
        self._heads = {
            "attn_q": self.metadata.get(f"{architecture}.attention.head_count"),
            "attn_k": self.metadata.get(
                f"{architecture}.attention.head_count_kv",
                self.metadata.get(f"{architecture}.attention.head_count"),
            ),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()

    def names(self) -> tuple[str, ...]:
        """The names of the weights, in file order."""
        in_config = () if self._architecture is None else self._architecture.in_config
        joined = {half: name for name, halves in self._halves.items() for half in halves}
        names = (joined.get(name, name) for name in self._file_of if name not in in_config)
        return tuple(dict.fromkeys(names))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``, without reading it."""
        if name in self._halves:
            keys, values = map(self.shape, self._halves[name])
            return keys[0] * (keys[2] + values[1]), keys[1]
        stored = self._file_of[name].tensors[name].shape
        if name in _ONE_BELOW_THE_OTHER:
            return int(np.prod(stored[:-1])), stored[-1]
        return (int(np.prod(stored)),) if name.endswith(_VECTORS) else stored

    def num_bytes(self, name: str) -> int:
        """The bytes that tensor ``name`` takes on disk."""
        if name in self._halves:
            return sum(map(self.num_bytes, self._halves[name]))
        entry = self._file_of[name].tensors[name]
        return entry.stop - entry.start

    def dtype(self, name: str) -> str:
        """float32: what blocks expand to; ``UnsupportedModelError`` for formats that cannot."""
        for part in self._halves.get(name, (name,)):
            self._file_of[part].entry(part)
        return "float32"

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        """The values of tensor ``name`` as stored, flat, or ``None`` if there is none."""
        file = self._file_of.get(name)
        if file is None:
            return None
        entry = file.entry(name)
        rows = int(np.prod(entry.shape[:-1]))
        return entry.format.dequantize(file.read_rows(name, 0, rows).reshape(-1))

    def tensor(self, name: str) -> Array:
        """Tensor ``name`` in float32."""
        out = empty(self.shape(name), "float32")
        self.read_into(name, out)
        return out

    def is_quantized(self, name: str) -> bool:
        """Whether tensor ``name`` is a matrix, or a stack of them, in blocks."""
        if name in self._halves:
            return False  # blocks of transposed matrices are none of the matrix's
        entry = self._file_of[name].entry(name)
        if self._value_heads is not None and name.endswith(_VALUES_READ):
            return False  # nor are blocks of reordered columns
        return len(self.shape(name)) > 1 and not entry.format.is_plain

    def format_name(self, name: str) -> str:
        """What tensor ``name`` is stored in, such as Q4_K."""
        return self._file_of[name].entry(name).format.name

    def blocks(self, name: str, index: int | None = None) -> GGUFBlocks:
        """Tensor ``name``, or one matrix of a stack, as blocks.

        Rows are in their right order; norms keep their offset.
        """
        found = self._file_of[name].blocks(name, index)
        if name in _ONE_BELOW_THE_OTHER:
            return replace(found, shape=self.shape(name))
        order = self._row_order(name, len(found.data))
        return found if order is None else replace(found, data=found.data[np.argsort(order)])

    def read_into(
        self,
        name: str,
        out: Array,
        on_bytes: Callable[[int], None] | None = None,
        *,
        first_row: int = 0,
    ) -> None:
        """Read rows of tensor ``name`` into ``out``, expanded; see `SafetensorsFile.read_into`.

        Raises:
            UnsupportedModelError: the tensor's format is not one that Ridgeline expands.
            CorruptFileError: the file has become shorter since it was opened.
            DiskError: the file cannot be read.
        """
        if name in self._halves:
            keys_HRn, values_HvR = map(self.tensor, self._halves[name])
            joined = np.concatenate([keys_HRn.swapaxes(1, 2), values_HvR], axis=1)
            rows = joined.reshape(-1, joined.shape[-1])
            out[...] = rows[first_row : first_row + len(out)]
            if on_bytes is not None:
                on_bytes(self.num_bytes(name))
            return
        file = self._file_of[name]
        entry = file.entry(name)
        assert out.flags.c_contiguous
        stored = self.shape(name)
        assert out.shape[1:] == stored[1:]
        assert first_row + len(out) <= stored[0]
        columns = stored[-1]
        if len(stored) == 1:
            self._read_vector(file, name, out, first_row)
            if on_bytes is not None:
                on_bytes(entry.format.num_bytes(len(out)))
            return
        out_RC = out.reshape(-1, columns)
        start = first_row * (out_RC.shape[0] // max(len(out), 1))
        order = self._row_order(name, int(np.prod(entry.shape[:-1])))
        if order is not None and len(order) != len(out_RC):
            out[...] = self.tensor(name)[first_row : first_row + len(out)]
            return
        step = max(1, _CHUNK_BYTES // entry.format.num_bytes(columns))
        for first in range(0, len(out_RC), step):
            count = min(step, len(out_RC) - first)
            data = file.read_rows(name, start + first, count)
            if order is None:
                expand_rows(entry.format, data, out_RC[first : first + count])
            else:
                rows = empty((count, columns), out.dtype.name)
                expand_rows(entry.format, data, rows)
                out_RC[order[first : first + count]] = rows
            if on_bytes is not None:
                on_bytes(data.nbytes)
        if self._value_heads is not None and name.endswith(_VALUES_READ):
            out[...] = out[:, np.argsort(self._order_of_values(name, columns))]

    def _tiled_heads(self, architecture: str) -> tuple[int, int, int] | None:
        """Key heads, value heads and their width together, if values go round the keys."""
        if self._architecture is None or not self._architecture.tiled_values:
            return None
        names = ("group_count", "time_step_rank", "inner_size")
        keys, values, width = (self.metadata.get(f"{architecture}.ssm.{name}") for name in names)
        if not (isinstance(keys, int) and isinstance(values, int) and isinstance(width, int)):
            return None  # which is refused
        return (keys, values, width) if 0 < keys < values and values % keys == 0 else None

    def _order_of_values(self, name: str, rows: int) -> npt.NDArray[np.int64]:
        """Where each of the last rows, which are those of all value heads, belongs."""
        assert self._value_heads is not None
        keys, values, width = self._value_heads
        size = values if _module(name) in _OF_HEADS else width
        if size % values or not 0 < size <= rows:
            raise CorruptFileError(
                f"Tensor {short_name(name)} has {rows} rows, which are no whole number of heads."
            )
        order = tiled_rows(keys, values, size // values)
        return np.concatenate([np.arange(rows - size), rows - size + order])

    def _halves_of_kv_b(self) -> dict[str, tuple[str, str]]:
        """By the tensor that two stand for: K's part ``[H, R, n]`` and V's ``[H, v, R]``.

        Raises:
            CorruptFileError: one of the two is missing, or they do not fit together.
        """
        found: dict[str, tuple[str, str]] = {}
        if self._architecture is None or not self._architecture.splits_kv_b:
            return found
        for name in self._file_of:
            if name.endswith(".attn_k_b.weight"):
                halves = name, name.replace("attn_k_b", "attn_v_b")
                shapes = [self.shape(half) for half in halves if half in self._file_of]
                if [len(shape) for shape in shapes] != [3, 3] or (
                    shapes[0][:2] != (shapes[1][0], shapes[1][2])
                ):
                    raise CorruptFileError(
                        f"Tensor {short_name(name)} has no attn_v_b that fits it beside it."
                    )
                found[name.replace("attn_k_b", "attn_kv_b")] = halves
        return found

    def _read_vector(self, file: GGUFFile, name: str, out: Array, first: int) -> None:
        entry = file.entry(name)
        rows = int(np.prod(entry.shape[:-1]))
        values = entry.format.dequantize(file.read_rows(name, 0, rows).reshape(-1))
        if name.endswith(_DECAY):
            if not (values < 0).all():
                raise CorruptFileError(f"Tensor {short_name(name)} has states that do not decay.")
            values = np.log(-values)
        has_offset = name.endswith("norm.weight") and not name.endswith(_VECTORS)
        if self._architecture is not None and has_offset:
            values = values - np.float32(self._architecture.norm_offset)
        order = self._row_order(name, len(values))
        if order is not None:
            values = values[np.argsort(order)]
        out[...] = values[first : first + len(out)]

    def _row_order(self, name: str, rows: int) -> npt.NDArray[np.int64] | None:
        """Where each stored row belongs (`interleaved_rows`), or ``None`` if all are in place."""
        module = _module(name)
        if self._value_heads is not None and module in (*_OF_HEADS, *_OF_VALUES):
            return self._order_of_values(name, rows)
        if self._architecture is None or not self._architecture.interleaved:
            return None
        if module not in self._heads:
            return None
        heads = self._heads[module]
        if isinstance(heads, np.ndarray) and heads.size:  # 0 in layers that do not attend
            heads = int(heads.max())
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise CorruptFileError(
                f"Tensor {short_name(name)} has {rows} rows, which are no whole number of heads."
            )
        return interleaved_rows(rows, heads)


def _module(name: str) -> str:
    """What a tensor's name says beside its layer and kind."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
