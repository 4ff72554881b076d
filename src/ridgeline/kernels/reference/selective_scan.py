"""Mamba-2's selective state space (Dao and Gu 2024, arXiv 2405.21060), token by token.

Shapes: S tokens of one sequence, H heads of p elements, G groups of n elements.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch


class ScanInputs(NamedTuple):
    """What the scan takes, in at least float32; ``step_SH`` are positive, ``decay_SH`` factors."""

    x_SHp: torch.Tensor
    write_SGn: torch.Tensor
    read_SGn: torch.Tensor
    step_SH: torch.Tensor
    decay_SH: torch.Tensor


def selective_scan(
    inputs: ScanInputs, state_Hnp: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each token what its state is read to ``[H, p]``, and the state after it."""
    shared = inputs.x_SHp.shape[1] // inputs.write_SGn.shape[1]
    write_SHn, read_SHn = (
        rows.repeat_interleave(shared, dim=1) for rows in (inputs.write_SGn, inputs.read_SGn)
    )
    change_SHp = inputs.x_SHp * inputs.step_SH[:, :, None]
    tokens = zip(change_SHp, write_SHn, read_SHn, inputs.decay_SH, strict=True)
    for change_Hp, write_Hn, read_Hn, decay_H in tokens:
        state_Hnp = state_Hnp * decay_H[:, None, None]
        state_Hnp = torch.baddbmm(state_Hnp, write_Hn[:, :, None], change_Hp[:, None])
        yield torch.einsum("hnp,hn->hp", state_Hnp, read_Hn), state_Hnp
