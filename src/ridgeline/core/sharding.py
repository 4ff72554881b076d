"""How a weight is spread over ranks: prices, memory and ranks read the same table."""

from ridgeline.core.op_facts import Split
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.weight_uses import WeightUse


def num_parts(use: WeightUse, layout: ParallelLayout) -> int:
    """Parts that a weight is cut into; each rank of a replica's stage holds one of them."""
    match use.split:
        case Split.WHOLE:
            return 1
        case Split.ROWS | Split.COLUMNS:
            return layout.tensor
        case Split.KV_HEADS:
            assert use.num_kv_heads is not None
            return num_kv_parts(use.num_kv_heads, layout)
        case Split.EXPERT_ROWS | Split.EXPERT_COLUMNS:
            # The tensor-parallel ranks that are left split each expert.
            return max(layout.tensor, layout.expert)


def num_kv_parts(num_kv_heads: int, layout: ParallelLayout) -> int:
    """Parts of the KV heads; with more ranks than heads, several hold the same one."""
    return min(layout.tensor, num_kv_heads)
