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
    """Sampling settings of R slots. Temperature 0 is greedy, top_k 0 keeps all.

    ``fractions``: float64 ``[3, R]``, temperature, top_p and min_p. ``counts``: int32 ``[2, R]``,
    top_k and sample index. ``seeds``: int64 ``[R]``, the bits of 64 without a sign.
    """

    fractions: torch.Tensor
    counts: torch.Tensor
    seeds: torch.Tensor


class SlotTables:
    """Tensors on the device that change as plans come in; `flush` issues the changes.

    They stay where they are, for recorded steps; ``settings`` are those of sampling.

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
            role: torch.empty(len(counts), rows, longest, dtype=torch.int32, device=at)
            for role, counts in pools.items()
        }
        for (role, group), spare in self._spare.items():
            self._tables[role][group].fill_(spare)
        self.settings = Settings(
            fractions=torch.zeros(3, rows, dtype=torch.float64, device=at),
            counts=torch.zeros(2, rows, dtype=torch.int32, device=at),
            seeds=torch.zeros(rows, dtype=torch.int64, device=at),
        )
        self._table_writes = {
            (role, group): Writes(self._tables[role][group]) for role, group in self._spare
        }
        self._setting_writes = tuple(
            map(Writes, (self.settings.fractions, self.settings.counts, self.settings.seeds))
        )

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

    def tables(self, role: ModelRole) -> torch.Tensor:
        """Block tables of a model, int32 ``[G, R, longest]``."""
        return self._tables[role]
