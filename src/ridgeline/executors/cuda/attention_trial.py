"""Two attentions over the KV pool, beside each other: whether they agree, and which is faster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import NamedTuple

import torch

from ridgeline.core import ops
from ridgeline.core.rounding import ceil_div
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.inputs import PassInput, SegmentTables, Short, Span
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.timing import Timer
from ridgeline.kernels.triton import KVTensors

Attend = Callable[[torch.Tensor, KVTensors, PassInput], torch.Tensor]

# The error of a sum of rounded terms, relative to its size.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}

_ROUNDS = 2  # in turns: clocks rise with work


class TrialShape(NamedTuple):
    """Sequences, the rows of queries of each, and the length of its KV."""

    batch: int
    tokens: int
    context: int


DECODE = (TrialShape(1, 1, 8192), TrialShape(8, 1, 4096), TrialShape(64, 1, 1024))
PREFILL = (TrialShape(1, 2048, 2048), TrialShape(1, 512, 8192))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How two attentions are compared; ``timer`` gives the seconds of a call on the device."""

    timer: Timer
    decode: tuple[TrialShape, ...] = DECODE
    prefill: tuple[TrialShape, ...] = PREFILL


class MismatchError(RuntimeError):
    """Two implementations do not agree."""


def compare(
    device: Device,
    cache: DeviceKVCache,
    ours: Attend,
    theirs: Attend,
    op: ops.Attend,
    *,
    decodes: bool,
    num_slots: int,
    table_blocks: int,
    trial: Trial,
) -> float:
    """How many times as fast theirs is, the geometric mean over points which the pool has room for.

    The KV of the op's layer is random meanwhile, and zero afterwards. Decode steps are timed as
    recorded ones, with tables of ``table_blocks`` entries: the choice of splits depends on them.

    Raises:
        MismatchError: an output is not finite, or not that of ours.
    """
    kv, group = cache.layer(op.layer), op.group
    num_blocks = cache.num_blocks[group]
    logs = []
    with _random(kv):
        for point in _fitting(
            trial.decode if decodes else trial.prefill,
            num_blocks=num_blocks,
            block_tokens=cache.block_tokens,
            table_blocks=table_blocks,
            num_slots=num_slots,
        ):
            at = _input(point, cache, group, table_blocks if decodes else None, device)
            shape = (point.batch * point.tokens, op.num_heads, op.head_dim)
            q = torch.randn(shape, dtype=kv.k.dtype, device=device.torch_device)
            _check(theirs(q, kv, at), ours(q, kv, at))
            rounds = [
                [
                    trial.timer(device, partial(each, q, kv, at), recorded=decodes)
                    for each in (ours, theirs)
                ]
                for _ in range(_ROUNDS)
            ]
            own_s, their_s = map(min, zip(*rounds, strict=True))
            logs.append(log(own_s / their_s))
    return exp(sum(logs) / len(logs)) if logs else 1.0


def _check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuse what is not equal but for rounding."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise MismatchError(f"{list(found.shape)} is not {list(expected.shape)}")
    wide = torch.float64 if found.dtype == torch.float64 else torch.float32
    error = float((found.to(wide) - expected.to(wide)).norm() / expected.to(wide).norm())
    tolerance = _TOLERANCES[found.dtype]
    if not error <= tolerance:  # not a number, either
        raise MismatchError(f"outputs differ by {error:.1e} of {tolerance:.0e}")


@contextmanager
def _random(kv: KVTensors) -> Iterator[None]:
    """KV as it might be, of which nothing is left."""
    try:
        for tensor in (kv.k, kv.v):
            tensor.normal_()
        yield
    finally:
        for tensor in (kv.k, kv.v):
            tensor.zero_()


def _fitting(
    points: tuple[TrialShape, ...],
    *,
    num_blocks: int,
    block_tokens: int,
    table_blocks: int,
    num_slots: int,
) -> tuple[TrialShape, ...]:
    """The points, no larger than pool, tables and batches are; equal ones once."""
    found = []
    for batch, tokens, context in points:
        batch = min(batch, num_slots, num_blocks)
        if batch == 0:
            continue
        context = min(context, min(num_blocks // batch, table_blocks) * block_tokens)
        found.append(TrialShape(batch, min(tokens, context), context))
    return tuple(dict.fromkeys(found))


def _input(
    point: TrialShape, cache: DeviceKVCache, group: int, table_blocks: int | None, device: Device
) -> PassInput:
    """Sequences whose last tokens are queries, with blocks scattered over the pool."""
    batch, tokens, context = point
    at = device.torch_device
    each = ceil_div(context, cache.block_tokens)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(cache.num_blocks[group], generator=generator)[: batch * each]
    tables = torch.full((batch, table_blocks or each), cache.num_blocks[group], dtype=torch.int32)
    tables[:, :each] = order.view(batch, each)
    first = context - tokens
    return PassInput(
        token_ids_T=torch.zeros(batch * tokens, dtype=torch.int64, device=at),
        positions_T=torch.arange(first, context, device=at).repeat(batch),
        query_starts_S1=torch.arange(batch + 1, dtype=torch.int32, device=at) * tokens,
        stops_S=torch.full((batch,), context, dtype=torch.int32, device=at),
        tables=SegmentTables([tables.to(at)] * (group + 1), torch.arange(batch, device=at)),
        slots=[],
        rope={},
        short=Short(batch, batch, 1) if table_blocks else Short(0, 0, 0),
        spans=None
        if table_blocks
        else tuple(
            Span(first=s * tokens, last=(s + 1) * tokens, start=first, stop=context)
            for s in range(batch)
        ),
    )
