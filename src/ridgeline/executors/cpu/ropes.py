"""Rotary tables that a program cannot keep: those that depend on how long a sequence is."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core.rope_spec import DynamicScaling, RopeSpec
from ridgeline.executors.cpu.batch import CPUBatch
from ridgeline.models import inverse_frequencies, rope_attention_factor

Floats = npt.NDArray[np.float32]


def depends_on_length(spec: RopeSpec) -> bool:
    """Whether a token's rotary frequencies depend on how long its sequence is."""
    return isinstance(spec.scaling, DynamicScaling)


def tables_by_length(ropes: Sequence[RopeSpec], batch: CPUBatch) -> tuple[list[Floats], Any]:
    """cos and sin of those tables that depend on sequence lengths; an address for each of all, 0
    for the others."""
    if not any(depends_on_length(spec) for spec in ropes):
        return [], None
    lengths, row = [], 0
    for state, count in zip(batch.states, batch.num_own, strict=True):
        stop = row + count
        lengths += [state.rope_length(position) for position in batch.positions[row:stop].tolist()]
        row = stop
    tables, addresses = [], []
    for spec in ropes:
        if depends_on_length(spec):
            tables.append(_cos_sin(spec, batch.positions, lengths))
            addresses.append(tables[-1].ctypes.data)
        else:
            addresses.append(0)
    return tables, (ctypes.c_void_p * len(addresses))(*addresses)


def _cos_sin(spec: RopeSpec, positions_T: npt.NDArray[np.int32], lengths: list[int]) -> Floats:
    """cos of all tokens ``[T, rotary_dim / 2]``, then sin; each by the length that it sees."""
    of_length = {length: inverse_frequencies(spec, sequence_length=length) for length in {*lengths}}
    frequencies = np.stack([of_length[length] for length in lengths])
    # The angles are float32, as checkpoints were trained.
    angles = (positions_T.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    factor = rope_attention_factor(spec)
    return (np.concatenate([np.cos(angles), np.sin(angles)]) * factor).astype(np.float32)
