"""What the device knows of each sequence, by slot: block tables and sampling settings.

There is one row more than slots, the last, for padding: its tables lead to the spare block of the
pools, where nobody reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.plan import Admission, BlockTableUpdate, ModelRole
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.staging import Staging, Writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sampling settings of N rows. Temperature 0 is greedy, top_k 0 keeps all.

    ``fractions``: float64 ``[3, N]``, temperature, top_p and min_p. ``counts``: int32 ``[2, N]``,
    top_k and sample index. ``seeds``: int64 ``[N]``, the bits of 64 without a sign.
    """

    fractions: torch.Tensor
    counts: torch.Tensor
    seeds: torch.Tensor


class SlotTables:
    """Tensors on the device that change as plans come in; `flush` issues the changes.

    ``pools`` gives the numbers of blocks of each model's KV groups; block n of a pool of n is the
    spare one. ``longest`` is how many blocks a sequence has at the most.
    """

    def __init__(
        self,
        device: Device,
        staging: Staging,
        pools: Mapping[ModelRole, Sequence[int]],
        *,
        num_slots: int,
        longest: int,
    ) -> None:
        self.num_slots, self.longest, self._staging = num_slots, longest, staging
        rows, at = num_slots + 1, device.torch_device
        self._spare = {
            (role, group): count
            for role, counts in pools.items()
            for group, count in enumerate(counts)
        }
        self._tables = {
            key: torch.full((rows, longest), count, dtype=torch.int32, device=at)
            for key, count in self._spare.items()
        }
        self._fractions = torch.zeros(3, rows, dtype=torch.float64, device=at)
        self._counts = torch.zeros(2, rows, dtype=torch.int32, device=at)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=at)
        self._table_writes = {key: Writes(table) for key, table in self._tables.items()}
        self._setting_writes = tuple(map(Writes, (self._fractions, self._counts, self._seeds)))

    @property
    def padding(self) -> int:
        """The slot of padding."""
        return self.num_slots

    def admit(self, admission: Admission) -> None:
        """Note the settings of the sequence that has this slot from now on."""
        params, slot, rows = admission.params, admission.slot, self.num_slots + 1
        fractions, counts, seeds = self._setting_writes
        temperature = 0.0 if params.is_greedy else params.temperature
        for index, value in enumerate((temperature, params.top_p, params.min_p)):
            fractions.add(index * rows + slot, value)
        for index, value in enumerate((max(params.top_k, 0), admission.sample_index)):
            counts.add(index * rows + slot, value)
        seeds.add(slot, admission.seed - (1 << 64 if admission.seed >= 1 << 63 else 0))

    def update_table(self, role: ModelRole, slot: int, update: BlockTableUpdate) -> None:
        """Note new entries; blocks that were given up behind a window are negative."""
        first, spare = slot * self.longest + update.first, self._spare[role, update.group]
        blocks = (block if block >= 0 else spare for block in update.blocks)
        self._table_writes[role, update.group].add(first, *blocks)

    def flush(self) -> None:
        """Issue every change since the last time."""
        for writes in (*self._table_writes.values(), *self._setting_writes):
            writes.flush(self._staging)

    def tables(
        self, role: ModelRole, group: int, slots: torch.Tensor, num_blocks: int
    ) -> torch.Tensor:
        """The first ``num_blocks`` entries of some slots' block tables, int32."""
        return self._tables[role, group][:, :num_blocks].index_select(0, slots)

    def kv_slots(
        self,
        role: ModelRole,
        group: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        block_tokens: int,
    ) -> torch.Tensor:
        """Flat KV slots ``block · block_tokens + offset`` of positions of some sequences, int64."""
        table = self._tables[role, group].view(-1)
        entries = slots * self.longest + positions // block_tokens
        return table.index_select(0, entries).long() * block_tokens + positions % block_tokens

    def settings(self, slots: torch.Tensor) -> Settings:
        """The sampling settings of some slots."""
        return Settings(
            fractions=self._fractions.index_select(1, slots),
            counts=self._counts.index_select(1, slots),
            seeds=self._seeds.index_select(0, slots),
        )
