"""Which experts each token goes to, and the tokens of each expert together.

Shapes: T tokens, E experts, k experts of a token, P = T · k pairs (token, expert); pair t · k + j
is token t's j-th.
"""

import torch
import triton
import triton.language as tl

from ridgeline.core.spec import GroupScore, RoutingSpec, Scoring
from ridgeline.kernels.triton.launch import next_power_of_2

_BLOCK_PAIRS = 128


class ExpertOrder:
    """Pairs in the order of their experts, each expert's padded to whole blocks.

    ``pairs`` int32 are numbers of pairs, `num_pairs` where a block has no more; ``block_experts``
    int32 the expert of each block, ``num_blocks`` int32 ``[1]`` how many blocks there are. Their
    sizes, and so the grids of kernels, are those of the worst case.

    Args:
        num_pairs: of a batch, exactly.
        block_pairs: of a block, at most; fewer where experts have few pairs each.
    """

    def __init__(
        self,
        num_pairs: int,
        num_experts: int,
        device: torch.device | str,
        block_pairs: int = _BLOCK_PAIRS,
    ) -> None:
        self.num_pairs, self.num_experts = num_pairs, num_experts
        self.block_pairs = pairs_of_a_block(num_pairs, num_experts, block_pairs)
        # Each expert with pairs fills at most one block in part.
        self.most_blocks = min(num_pairs, num_experts) + num_pairs // self.block_pairs

        def empty(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.pairs = empty(self.most_blocks * self.block_pairs)
        self.block_experts = empty(self.most_blocks)
        self.num_blocks = empty(1)
        self.counts_E = empty(num_experts)


def pairs_of_a_block(num_pairs: int, num_experts: int, most: int = _BLOCK_PAIRS) -> int:
    """About what an expert has, and no more than ``most``."""
    return min(most, max(16, next_power_of_2(num_pairs // num_experts)))


def pairs_of_a_pass(num_pairs: int) -> int:
    """How many pairs a program looks at in each turn as it sorts them."""
    return min(1024, max(16, next_power_of_2(num_pairs)))


def route(
    logits_TE: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    spec: RoutingSpec,
    *,
    correction_E: torch.Tensor | None = None,
) -> None:
    """Each token's experts (int32), best first, and their weights (float32).

    As `ridgeline.kernels.reference.route`; of equal experts the first is chosen.
    """
    num_experts = logits_TE.shape[1]
    groups = spec.groups
    _route[(len(logits_TE),)](
        logits_TE,
        logits_TE if correction_E is None else correction_E,
        experts_Tk,
        weights_Tk,
        logits_TE.stride(0),
        spec.scale,
        NUM_EXPERTS=num_experts,
        TOP_K=spec.top_k,
        SOFTMAX=spec.scoring is Scoring.SOFTMAX,
        NORMALISED=spec.normalised,
        HAS_CORRECTION=correction_E is not None,
        GROUPS=0 if groups is None else groups.num_groups,
        TOP_GROUPS=0 if groups is None else groups.top_groups,
        BEST_TWO=groups is not None and groups.score is GroupScore.BEST_TWO,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_G=1 if groups is None else next_power_of_2(groups.num_groups),
        num_warps=1 if num_experts <= 128 else 4,
    )


def sort_by_expert(experts_Tk: torch.Tensor, order: ExpertOrder) -> None:
    """Fill ``order`` with the pairs of a batch; within an expert they keep their order.

    Raises:
        ValueError: the order is for another number of pairs.
    """
    if experts_Tk.numel() != order.num_pairs:
        raise ValueError(f"{experts_Tk.numel()} pairs in an order of {order.num_pairs}")
    block = pairs_of_a_pass(order.num_pairs)
    _count_pairs[(order.num_experts,)](
        experts_Tk, order.counts_E, order.num_pairs, BLOCK=block, num_warps=4
    )
    _place_pairs[(order.num_experts,)](
        experts_Tk,
        order.counts_E,
        order.pairs,
        order.block_experts,
        order.num_blocks,
        order.num_pairs,
        NUM_EXPERTS=order.num_experts,
        BLOCK_E=next_power_of_2(order.num_experts),
        BLOCK_PAIRS=order.block_pairs,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _route(
    logits,
    correction,
    experts,
    weights,
    logits_stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    real = e < NUM_EXPERTS
    x = tl.load(logits + token * logits_stride + e, mask=real, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1 / (1 + tl.exp(-x))
    ranking = scores
    if HAS_CORRECTION:
        ranking += tl.load(correction + e, mask=real, other=0.0).to(tl.float32)
    ranking = tl.where(real, ranking, float("-inf"))
    if GROUPS > 0:
        ranking = _best_groups(
            ranking, e, NUM_EXPERTS // GROUPS, GROUPS, TOP_GROUPS, BEST_TWO, BLOCK_G
        )
    total = 0.0
    for rank in tl.static_range(TOP_K):
        best = tl.argmax(ranking, 0)
        weight = tl.sum(tl.where(e == best, scores, 0.0), 0)
        total += weight
        tl.store(experts + token * TOP_K + rank, best)
        tl.store(weights + token * TOP_K + rank, weight)
        ranking = tl.where(e == best, float("-inf"), ranking)
    factor = scale
    if NORMALISED:
        factor = scale / (total + 1e-20)
    tl.debug_barrier()  # what is scaled now was stored by one thread, and is read by others
    for rank in tl.static_range(TOP_K):
        at = weights + token * TOP_K + rank
        tl.store(at, tl.load(at) * factor)


@triton.jit
def _best_groups(
    ranking,
    e,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The ranking with −inf for experts outside of the best groups."""
    g = tl.arange(0, BLOCK_G)
    scores = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(e // WIDTH == group, ranking, float("-inf"))
        score = tl.max(members, 0)
        if BEST_TWO:
            others = tl.where(e == tl.argmax(members, 0), float("-inf"), members)
            score += tl.max(others, 0)
        scores = tl.where(g == group, score, scores)
    chosen = tl.zeros_like(ranking)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(scores, 0)
        chosen = tl.where(e // WIDTH == best, 1.0, chosen)
        scores = tl.where(g == best, float("-inf"), scores)
    return tl.where(chosen > 0, ranking, float("-inf"))


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(experts, counts, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found += (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs(
    experts,
    counts,
    pairs,
    block_experts,
    num_blocks,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each expert: its blocks begin where those of the experts before it end."""
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    blocks = (tl.load(counts + e, mask=e < NUM_EXPERTS, other=0) + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    first_block = tl.sum(tl.where(e < expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(e == expert, blocks, 0), 0)
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    lanes = tl.arange(0, BLOCK_PAIRS)
    for block in tl.range(0, own_blocks):
        tl.store(block_experts + first_block + block, expert)
    if own_blocks > 0:
        last = (first_block + own_blocks - 1) * BLOCK_PAIRS
        count = tl.load(counts + expert) - (own_blocks - 1) * BLOCK_PAIRS
        tl.store(pairs + last + lanes, num_pairs, mask=lanes >= count)
    placed = first_block * BLOCK_PAIRS
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        own = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(pairs + placed + rank - 1, pair, mask=own)
        placed += tl.sum(own.to(tl.int32), 0)
