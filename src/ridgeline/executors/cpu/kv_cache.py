"""The paged KV cache in the layout of csrc/cpu/kv_cache.h, and the states of sequences."""

import ctypes
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.cache_groups import kv_groups, state_group
from ridgeline.core.errors import OutOfMemoryError, SettingsError
from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.ops import Rope
from ridgeline.core.protocols import KVLayout
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.cpu.traits import KV_SUB_BLOCK
from ridgeline.executors.kv_reuse import turn
from ridgeline.kernels.cpu.group import RankGroup
from ridgeline.kernels.cpu.memory import aligned_bytes
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import SEQUENCE, RlBatch, RlFormat, RlKVGroup

LAYOUT_VERSION = 1
_FORMATS = {
    "float32": RlFormat.F32,
    "float16": RlFormat.F16,
    "bfloat16": RlFormat.BF16,
    "int8": RlFormat.INT8,
    "int4": RlFormat.INT4,
    "fp8": RlFormat.FP8,
}


def check_block_tokens(block_tokens: int) -> None:
    """Raises:
    SettingsError: blocks of so many tokens are not whole multiples of 16.
    """
    if block_tokens % KV_SUB_BLOCK:
        raise SettingsError(
            f"The cpu executor's KV blocks are multiples of {KV_SUB_BLOCK} tokens, not "
            f"{block_tokens}."
        )


class KVCache:
    """KV pool of one model. A block holds all layers of its group, so that it moves in one piece.
    So does a state, which is a block of the group after those of KV.

    `check_block_tokens` says which sizes of blocks there are. Where ranks share contexts
    (``part``: this rank of how many), the pool has the rank's part of the blocks alone, which keep
    their numbers.
    """

    def __init__(
        self,
        pool: Pool,
        spec: ModelSpec,
        dtype: str,
        block_tokens: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._pool, self._library = pool, pool.library
        self.rank, self.context_ranks = part
        self._dtype = dtype
        self._memory: list[npt.NDArray[np.uint8]] = []
        self.groups, self._states = kv_groups(spec), state_group(spec)
        self.structs = (RlKVGroup * len(self.groups))(
            *(
                RlKVGroup(
                    format=_FORMATS[dtype],
                    block_tokens=block_tokens,
                    num_layers=len(group.layers),
                    num_kv_heads=group.num_kv_heads,
                    k_width=group.k_width,
                    v_width=group.v_width,
                )
                for group in self.groups
            )
        )
        for struct in self.structs:
            self._library.rl_kv_group_sizes(ctypes.byref(struct))
        self.block_tokens = block_tokens

    @property
    def layout(self) -> KVLayout:
        states = self._states
        identity = f"cpu/{LAYOUT_VERSION}/{self._dtype}/{self.block_tokens}/{self.groups}"
        if states is not None:
            identity += f"/{states}"
        return KVLayout(
            block_tokens=self.block_tokens,
            groups=self.groups,
            block_bytes=self._block_bytes,
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            states=states,
        )

    @property
    def _block_bytes(self) -> tuple[int, ...]:
        of_states = () if self._states is None else (self._states.num_bytes,)
        return (*(struct.block_bytes for struct in self.structs), *of_states)

    @property
    def has_states(self) -> bool:
        return self._states is not None

    def state_address(self, block: int) -> int:
        """Where a state lies."""
        states = self._memory[-1]
        return int(states.ctypes.data + block * states.shape[1])

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Create the pools, whose memory is taken as blocks are written.

        Raises:
            OutOfMemoryError: they do not fit.
        """
        try:
            for num_bytes, whole in zip(self._block_bytes, num_blocks, strict=True):
                count = whole // self.context_ranks
                self._memory.append(aligned_bytes(num_bytes * count).reshape(count, num_bytes))
            for struct, memory in zip(self.structs, self._memory, strict=False):
                struct.data = memory.ctypes.data
                if self.context_ranks > 1:
                    struct.num_blocks = len(memory)
                    struct.first_block = self.rank * len(memory)
                    struct.data -= struct.first_block * struct.block_bytes
        except MemoryError as error:
            raise OutOfMemoryError("The KV pool does not fit into memory.") from error

    def copy_block(self, group: int, source: int, target: int) -> None:
        memory, first = self._memory[group], self._first(group)
        if 0 <= target - first < len(memory):
            memory[target - first] = memory[source - first]

    def move_slots(
        self,
        group: int,
        table: npt.NDArray[np.int32],
        sources: Sequence[int],
        first_target: int,
        ranks: RankGroup | None = None,
    ) -> None:
        """Copy a sequence's KV slots to consecutive ones; sources are read before any write. All
        ``ranks`` that share contexts do so together."""
        from_slots = np.array(sources, dtype=np.int32)
        to_slots = np.arange(first_target, first_target + len(sources), dtype=np.int32)
        struct = self.structs[group]
        if self.context_ranks > 1:
            first, last = first_target // self.block_tokens, max(sources) // self.block_tokens
            blocks = table[first : last + 1]
            owners = blocks // struct.num_blocks
            own = [int(block) for block in blocks[owners == self.rank]]
            rows = np.zeros((len(blocks), struct.block_bytes), dtype=np.uint8)
            rows[owners == self.rank] = self._memory[group][self._places(group, own)]
            if len(set(owners.tolist())) > 1:  # they lie in the runs of two ranks
                assert ranks is not None
                with ranks.pool.lock:
                    rows = ranks.gather_rows(rows, owners)
            struct = RlKVGroup.from_buffer_copy(struct)
            struct.data, struct.num_blocks = rows.ctypes.data, 0
            table = np.arange(-first, len(blocks), dtype=np.int32)
        self._library.rl_kv_move(
            ctypes.byref(struct), table.ctypes.data, from_slots.ctypes.data, to_slots.ctypes.data,
            len(sources),
        )  # fmt: skip
        if self.context_ranks > 1:
            self._memory[group][self._places(group, own)] = rows[owners == self.rank]

    def move_head(
        self,
        group: int,
        layer: int,
        head: int,
        table: npt.NDArray[np.int32],
        sources: npt.NDArray[np.int32],
    ) -> None:
        """Copy slots of one KV head of one layer, by its place in the group, to the first ones."""
        of_head = RlKVGroup.from_buffer_copy(self.structs[group])
        per_head = of_head.layer_bytes // of_head.num_kv_heads
        of_head.data += layer * of_head.layer_bytes + head * per_head
        of_head.num_layers = of_head.num_kv_heads = 1
        targets = np.arange(len(sources), dtype=np.int32)
        self._library.rl_kv_move(
            ctypes.byref(of_head), table.ctypes.data, sources.ctypes.data, targets.ctypes.data,
            len(sources),
        )  # fmt: skip

    def reuse(
        self,
        group: int,
        place: int,
        source: Sequence[int],
        table: Sequence[int],
        reuse: KVReuse,
        rope: Rope | None,
    ) -> None:
        first, start, stop, _ = reuse
        blocks = np.array([*source, *table], dtype=np.int32)
        own, count = blocks[len(source) :], stop - start
        slots = np.arange(count, dtype=np.int32)
        sources, targets = (
            slots + (start - first),
            slots + (len(source) * self.block_tokens + start),
        )
        of_layer = RlKVGroup.from_buffer_copy(self.structs[group])
        of_layer.data += place * of_layer.layer_bytes
        of_layer.num_layers = 1
        self._library.rl_kv_move(
            ctypes.byref(of_layer), blocks.ctypes.data, sources.ctypes.data, targets.ctypes.data,
            count,
        )  # fmt: skip
        if rope is None or not first:
            return
        k_CKd, v_CKd = self._read(group, place, blocks, start - first, count)
        turn(k_CKd, rope, first)
        tables = np.array([own.ctypes.data], dtype=np.uint64)
        sequence = np.zeros(1, dtype=SEQUENCE)
        sequence["num_tokens"], sequence["start"] = count, start
        sequence["block_tables"] = tables.ctypes.data
        batch = RlBatch(num_tokens=count, num_sequences=1, sequences=sequence.ctypes.data)
        with self._pool.lock:
            self._library.rl_kv_write(
                self._pool.handle, ctypes.byref(self.structs[group]), 0, place,
                ctypes.byref(batch), k_CKd.ctypes.data, v_CKd.ctypes.data,
            )  # fmt: skip

    def read_keys(
        self, group: int, layer: int, table: npt.NDArray[np.int32], count: int
    ) -> npt.NDArray[np.float32]:
        """K ``[count, K, k_width]`` of a sequence's first slots in one layer of a group."""
        return self._read(group, layer, table, 0, count)[0]

    def _read(
        self, group: int, layer: int, table: npt.NDArray[np.int32], start: int, count: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """K and V ``[count, K, width]`` of slots from ``start`` on in one layer of a group."""
        kv = self.groups[group]
        keys = np.empty((count, kv.num_kv_heads, kv.k_width), dtype=np.float32)
        values = np.empty((count, kv.num_kv_heads, kv.v_width), dtype=np.float32)
        self._library.rl_kv_read(
            ctypes.byref(self.structs[group]), layer, table.ctypes.data, start, count,
            keys.ctypes.data, values.ctypes.data,
        )  # fmt: skip
        return keys, values

    def export_blocks(self, group: int, blocks: Sequence[int]) -> bytes:
        return self._memory[group][self._places(group, blocks)].tobytes()

    def import_blocks(self, group: int, blocks: Sequence[int], data: bytes) -> None:
        block_bytes = self._block_bytes[group]
        if len(data) != block_bytes * len(blocks):
            raise ValueError(f"{len(data)} bytes are not {len(blocks)} blocks of group {group}")
        values = np.frombuffer(data, dtype=np.uint8).reshape(len(blocks), block_bytes)
        self._memory[group][self._places(group, blocks)] = values

    def _first(self, group: int) -> int:
        """The first block that is here."""
        return self.structs[group].first_block if group < len(self.structs) else 0

    def _places(self, group: int, blocks: Sequence[int]) -> list[int]:
        first = self._first(group)
        return [block - first for block in blocks]

    def close(self) -> None:
        self._memory.clear()
