"""What the device keeps of sequences and of tokens between steps."""

from collections.abc import Mapping, Sequence

import torch

from ridgeline.core.plan import Admission, ModelRole
from ridgeline.executors.cuda.adjustments import Adjustments
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.graphs import TokenLog
from ridgeline.executors.cuda.slots import SlotTables
from ridgeline.executors.cuda.staging import Staging

_ARRIVALS = 4  # pinned buffers for drawn tokens: two steps may be in flight


class OnDevice:
    """Tables by slot, and the tokens that were drawn.

    Args:
        pools: numbers of blocks of each model's KV groups.
        longest: blocks of the longest sequence.
        vocab: of the target.
    """

    def __init__(
        self,
        device: Device,
        staging: Staging,
        pools: Mapping[ModelRole, Sequence[int]],
        *,
        num_slots: int,
        longest: int,
        vocab: int,
    ) -> None:
        self.slots = SlotTables(device, staging, pools, num_slots=num_slots, longest=longest)
        self.log = TokenLog(device, num_slots)
        self.adjustments = Adjustments(device, staging, num_slots=num_slots, vocab=vocab)
        shape = (len(self.log.values),)
        self._arrivals = tuple(device.staging(shape, torch.int64) for _ in range(_ARRIVALS))
        self._num_arrivals = 0

    def admit(self, admission: Admission) -> None:
        """Note the settings of the sequence that has this slot from now on."""
        self.slots.admit(admission)
        self.adjustments.admit(admission)

    def fetch(self, count: int) -> torch.Tensor:
        """Copy the first tokens of the log to pinned memory, behind what has been issued."""
        target = self._arrivals[self._num_arrivals % _ARRIVALS][:count]
        self._num_arrivals += 1
        target.copy_(self.log.values[:count], non_blocking=True)
        return target
