"""The beginning and the end of a decode step against the same in PyTorch ops."""

import pytest
import torch
from tests.kernels.triton.device import DEVICE

from ridgeline.executors.cuda.torch_kernels import TorchKernels
from ridgeline.kernels.triton import StepRows, begin_step, end_step

NUM_SLOTS, BLOCKS, PAGE = 20, 7, 4


class Step:
    """Inputs of a step of ``rows``: tokens, references to tokens and to what was not drawn."""

    def __init__(self, rows, groups=2):
        generator = torch.Generator().manual_seed(rows)

        def integers(low, high, *shape):
            return torch.randint(low, high, shape, generator=generator)

        self.log = integers(0, 50, 3 * rows + 1)
        self.log[-1] = -1
        self.log[integers(0, 3 * rows, rows // 4)] = -1
        self.inputs = torch.zeros(3 * rows + 1, dtype=torch.int64)
        self.sources, self.positions, self.slots = self.inputs[:-1].view(3, rows)
        self.number = self.inputs[-1:]
        self.sources.copy_(
            torch.where(integers(0, 2, rows) > 0, 7, -1 - integers(0, 3 * rows, rows))
        )
        self.sources[-1] = -1 - 3 * rows  # padding
        self.positions.copy_(integers(0, BLOCKS * PAGE, rows))
        self.slots.copy_(torch.arange(rows) % NUM_SLOTS)
        self.number.fill_(2)
        self.tables = integers(0, 1000, groups, NUM_SLOTS + 1, BLOCKS).int()
        for name, value in vars(self).items():
            setattr(self, name, value.to(DEVICE))
        self.sources, self.positions, self.slots = self.inputs[:-1].view(3, rows)
        self.number = self.inputs[-1:]

    def begin(self):
        return self.sources, self.positions, self.slots, self.log, self.tables


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_are_those_of_the_torch_ops(rows, groups):
    step = Step(rows, groups)
    expected = TorchKernels().begin_step(*step.begin(), block_tokens=PAGE)
    found = StepRows.empty(rows, groups, torch.device(DEVICE))
    begin_step(*step.begin(), found, block_tokens=PAGE)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert found.slots_T[-1] == NUM_SLOTS
    assert found.positions_T[-1] == found.token_ids_T[-1] == 0


@pytest.mark.parametrize("rows", [1, 5, 1100])  # the last takes two turns
def test_a_step_leaves_the_inputs_of_the_next(rows):
    ours, theirs = Step(rows), Step(rows)
    drawn = torch.arange(rows, device=DEVICE) - 1
    kept = TorchKernels().begin_step(*theirs.begin(), block_tokens=PAGE)
    for _ in range(2):
        for each in (ours, theirs):
            each.number.fill_(each.number.item() % 3)  # the log has room for three
        TorchKernels().end_step(
            theirs.sources, theirs.positions, theirs.number, kept, drawn, theirs.log,
            padding=NUM_SLOTS,
        )  # fmt: skip
        end_step(
            ours.sources, ours.positions, ours.number, kept.slots_T, drawn, ours.log,
            padding=NUM_SLOTS,
        )  # fmt: skip
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.log, theirs.log)
    assert ours.log[-1] == -1
