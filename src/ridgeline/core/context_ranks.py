"""How context-parallel ranks share sequences: KV in runs of tokens, long ranges in parts."""

from ridgeline.core.parallel_layout import borders
from ridgeline.core.rounding import ceil_div

RUN_TOKENS = 512  # of a sequence's KV, that are of one context-parallel rank (RL_SHARED_TOKENS)
LEAST_TOKENS = 64  # of a range that ranks share, for each of them
MOST_BLOCK_TOKENS = LEAST_TOKENS  # so that each has a block of it


def is_shared(num_tokens: int, context_ranks: int) -> bool:
    """Whether context-parallel ranks share a range of so many tokens without drafts, rather than
    compute all of it each."""
    return context_ranks > 1 and num_tokens >= LEAST_TOKENS * context_ranks


def context_cuts(start: int, stop: int, num_ranks: int, block_tokens: int) -> tuple[int, ...]:
    """Where the parts of a shared range begin, and its end: between blocks.

    >>> context_cuts(10, 150, 2, 16)
    (10, 80, 150)
    """
    first, last = start // block_tokens, ceil_div(stop, block_tokens)
    edges = (first + edge for edge in borders(last - first, num_ranks))
    return tuple(min(max(edge * block_tokens, start), stop) for edge in edges)


def context_blocks(num_blocks: int, num_ranks: int, block_tokens: int) -> int:
    """Blocks of a pool that context-parallel ranks share equally, with which a sequence of
    ``num_blocks`` runs: each rank has as many as the fullest one needs.

    >>> context_blocks(10, 2, 16), context_blocks(70, 2, 16)
    (20, 128)
    """
    if num_ranks == 1:
        return num_blocks
    run = RUN_TOKENS // block_tokens
    return num_ranks * min(num_blocks, ceil_div(num_blocks, num_ranks * run) * run)
