"""What stays of prompts that end in a step, layer by layer; see `executors.kv_selection`."""

import numpy as np

from ridgeline.core.ops import Attend
from ridgeline.executors.cpu.batch import CPUBatch
from ridgeline.executors.cpu.kv_cache import KVCache
from ridgeline.executors.cpu.program import Program
from ridgeline.executors.cpu.weights import PackedWeights
from ridgeline.executors.kv_selection import chosen_slots
from ridgeline.kernels.cpu.structs import RlBuffer


def ends_prompts(batch: CPUBatch) -> bool:
    """Whether something is to be chosen of a prompt."""
    return any(item.segment.selection is not None for item in batch.items)


def choose(
    op: Attend, program: Program, weights: PackedWeights, batch: CPUBatch, cache: KVCache
) -> None:
    """Once a layer has attended, move the chosen K and V of each KV head to its first slots."""
    queries = program.rows(RlBuffer.QUERY, batch.num_tokens)[:, : op.num_heads * op.head_dim]
    sinks_H = None if op.sinks is None else weights.vectors[op.sinks.name]
    row = 0
    for item, state in zip(batch.items, batch.states, strict=True):
        first, row = row, row + item.segment.num_tokens
        if item.segment.selection is None:
            continue
        table = state.native_table(batch.role, op.group)
        layer = cache.groups[op.group].layers.index(op.layer)
        q_THd = queries[first:row].reshape(-1, op.num_heads, op.head_dim)
        k_PKd = cache.read_keys(op.group, layer, table, item.segment.stop)
        chosen = chosen_slots(op, item.segment, q_THd, k_PKd, sinks_H)
        for head, slots in enumerate(chosen.astype(np.int32)):
            cache.move_head(op.group, layer, head, table, slots)
