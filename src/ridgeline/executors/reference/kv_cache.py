"""Paged K and V of one model, a tensor per layer; and the states of its sequences.

Shapes: N blocks, B tokens a block, K KV heads, d and v the widths of a head of K and of V, C
positions read.
"""

import hashlib
from collections.abc import Sequence
from math import prod

import torch

from ridgeline.core.cache_groups import KVGroup, kv_groups, state_group
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.ops import Rope
from ridgeline.core.protocols import KVLayout
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.kv_reuse import turn_tables
from ridgeline.kernels.reference import rotate
from ridgeline.kernels.reference.kv_codes import code_bytes, decode, encode

LAYOUT_VERSION = 4


class ReferenceKVCache:
    """KV pool of one model. Blocks are written by `write` and copies, owned by the scheduler.

    ``states`` is the pool of states, one in each row, if the model has some; it is the group after
    those of KV.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, block_tokens: int, form: str = "auto"
    ) -> None:
        self.groups = kv_groups(spec)
        self.block_tokens = block_tokens
        self._form = None if form == "auto" else form  # of codes
        self._dtype = dtype
        self._stored = dtype if self._form is None else torch.uint8
        self._pools: dict[int, torch.Tensor] = {}  # layer -> [N, B, K, d + v], or their bytes
        self._state_group = state_group(spec)
        self._state_dtype = torch.promote_types(dtype, torch.float32)
        self.states = torch.empty(0)

    @property
    def layout(self) -> KVLayout:
        sizes = tuple(
            len(group.layers) * prod(self._block_shape(group)) * self._stored.itemsize
            for group in self.groups
        )
        states = self._state_group
        if states is not None:
            sizes += (sum(states.elements) * self._state_dtype.itemsize,)
        stored = self._form or self._dtype
        identity = f"reference/{LAYOUT_VERSION}/{stored}/{self.block_tokens}/{self.groups}"
        if states is not None:
            identity += f"/{states}"
        return KVLayout(
            block_tokens=self.block_tokens,
            groups=self.groups,
            block_bytes=sizes,
            states=states,
            digest=hashlib.sha256(identity.encode()).hexdigest(),
        )

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Create the pools, whose memory is taken as blocks are written.

        Raises:
            OutOfMemoryError: they do not fit.
        """
        try:
            for group, count in zip(self.groups, num_blocks, strict=False):
                for layer in group.layers:
                    shape = (count, *self._block_shape(group))
                    self._pools[layer] = torch.empty(shape, dtype=self._stored)
            if self._state_group is not None:
                width = sum(self._state_group.elements)
                self.states = torch.empty(num_blocks[-1], width, dtype=self._state_dtype)
        except RuntimeError as error:
            raise OutOfMemoryError("The KV pool does not fit into memory.") from error

    def write(
        self, layer: int, rows: torch.Tensor, k_TKd: torch.Tensor, v_TKv: torch.Tensor | None
    ) -> None:
        """Store K, and V if the group has it, at flat rows ``block · B + offset``."""
        parts = [k_TKd] if v_TKv is None else [k_TKd, v_TKv]
        if self._form is not None:
            parts = [encode(self._form, part) for part in parts]
        self._rows(layer)[rows] = torch.cat(parts, dim=-1)

    def read(self, group: int, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[C, K, d]`` and V ``[C, K, v]`` at flat rows; V is empty if v is zero."""
        stored, k_width = self._rows(layer)[rows], self.groups[group].k_width
        if self._form is None:
            return stored[..., :k_width], stored[..., k_width:]
        k_bytes = code_bytes(self._form, k_width)
        k_CKd = decode(self._form, stored[..., :k_bytes], self._dtype)
        if not self.groups[group].v_width:
            return k_CKd, k_CKd[..., :0]
        return k_CKd, decode(self._form, stored[..., k_bytes:], self._dtype)

    def copy_block(self, group: int, source: int, target: int) -> None:
        if group == len(self.groups):
            self.states[target] = self.states[source]
            return
        for layer in self.groups[group].layers:
            self._pools[layer][target] = self._pools[layer][source]

    def move_rows(self, group: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy tokens from flat rows to other flat rows; sources are read before any write."""
        for layer in self.groups[group].layers:
            pool = self._rows(layer)
            pool[targets] = pool[sources]

    def move_heads(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy tokens of one layer from flat rows ``[K, N]``, those of each KV head, to ``[N]``."""
        pool = self._rows(layer)
        heads_1K = torch.arange(len(sources))[None, :]
        pool[targets[:, None], heads_1K] = pool[sources.T, heads_1K]

    def reuse(
        self,
        group: int,
        place: int,
        source: Sequence[int],
        table: Sequence[int],
        reuse: KVReuse,
        rope: Rope | None,
    ) -> None:
        layer, k_width = self.groups[group].layers[place], self.groups[group].k_width
        first, start, stop, _ = reuse
        sources = kv_rows(source, start - first, stop - first, self.block_tokens)
        rows, pool = kv_rows(table, start, stop, self.block_tokens), self._rows(layer)
        pool[rows] = pool[sources]
        if rope is None or not first:
            return
        cos, sin = map(torch.from_numpy, turn_tables(rope, first))
        k_CKd, _ = self.read(group, layer, sources)
        turned = rotate(
            k_CKd,
            (cos.expand(len(rows), -1), sin.expand(len(rows), -1)),
            start=rope.key_start,
            interleaved=rope.spec.interleaved,
        )
        if self._form is not None:
            k_width, turned = code_bytes(self._form, k_width), encode(self._form, turned)
        pool[rows, :, :k_width] = turned

    def export_blocks(self, group: int, blocks: Sequence[int]) -> bytes:
        picked = [self._pools[layer][list(blocks)] for layer in self.groups[group].layers]
        return torch.stack(picked, dim=1).contiguous().view(torch.uint8).numpy().tobytes()

    def import_blocks(self, group: int, blocks: Sequence[int], data: bytes) -> None:
        if len(data) != self.layout.block_bytes[group] * len(blocks):
            raise ValueError(f"{len(data)} bytes are not {len(blocks)} blocks of group {group}")
        kv = self.groups[group]
        shape = (len(blocks), len(kv.layers), *self._block_shape(kv))
        values = torch.frombuffer(bytearray(data), dtype=self._stored).view(shape)
        for layer, value in zip(kv.layers, values.unbind(dim=1), strict=True):
            self._pools[layer][list(blocks)] = value

    def _rows(self, layer: int) -> torch.Tensor:
        return self._pools[layer].flatten(0, 1)

    def _block_shape(self, group: KVGroup) -> tuple[int, int, int]:
        widths = (group.k_width, group.v_width)
        if self._form is not None:
            widths = (code_bytes(self._form, widths[0]), code_bytes(self._form, widths[1]))
        return self.block_tokens, group.num_kv_heads, sum(widths)


def kv_rows(table: Sequence[int], start: int, stop: int, block_tokens: int) -> torch.Tensor:
    """Flat cache rows of KV slots ``[start, stop)`` of a sequence with this block table."""
    blocks, slots = torch.tensor(table), torch.arange(start, stop)
    return blocks[slots // block_tokens] * block_tokens + slots % block_tokens
