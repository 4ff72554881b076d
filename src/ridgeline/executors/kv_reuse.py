"""How keys that were computed at one position become those of another: each rotary layer turns them
by the angles of the difference. Position p's key is R(p) k, and R(p + Δ) k = R(Δ) R(p) k (Su et al.
2021, arXiv 2104.09864, section 3.4.3)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.ops import (
    Attend,
    BidirectionalAttend,
    Embed,
    GatedDelta,
    GrowQueries,
    HeadNorm,
    KVWrite,
    LatentAttend,
    Op,
    Rope,
    SelectiveScan,
    ShortConv,
)
from ridgeline.core.plan import ModelRole
from ridgeline.core.rope_spec import DynamicScaling
from ridgeline.executors.outputs import SegmentContext
from ridgeline.models import inverse_frequencies

Floats = npt.NDArray[np.float32]


def why_not_moved(ops: Iterable[Op]) -> str | None:
    """What of a model keeps KV where it was computed, in words; ``None`` if nothing does."""
    rotated = False
    for op in ops:
        match op:
            case Embed(positions=positions) if positions is not None:
                return "learned positions"
            case LatentAttend():
                return "latents"
            case ShortConv() | GatedDelta() | SelectiveScan():
                return "states beside KV"
            case BidirectionalAttend():
                return "attention in both directions"
            case GrowQueries():
                return "queries that grow with their position"
            case Attend(window=window):
                if window is not None:
                    return "windowed layers"
                rotated = False
            case Rope(spec=spec):
                if isinstance(spec.scaling, DynamicScaling):
                    return "rotary frequencies that depend on the prompt's length"
                rotated = True
            case HeadNorm(num_kv_heads=heads) if heads and rotated:
                return "a norm of keys behind their rotation"
    return None


class Reuse(Protocol):
    """In one layer of a group, by its place there, takes what is in the blocks ``source`` over into
    those of a sequence's ``table``; ``rope`` is what turned its keys, if anything did."""

    def __call__(
        self,
        group: int,
        place: int,
        source: Sequence[int],
        table: Sequence[int],
        reuse: KVReuse,
        rope: Rope | None,
    ) -> None: ...


def take_over(items: Iterable[SegmentContext], ops: Iterable[Op], reuse: Reuse) -> None:
    """Take over what a pass of the target (its ``ops``) has of documents, its tables in place."""
    wanted = [(item.state, each) for item in items for each in item.segment.reuses]
    if not wanted:
        return
    rope, num_layers = None, Counter[int]()
    for op in ops:
        if isinstance(op, Rope):
            rope = op
        elif isinstance(op, KVWrite):
            for state, each in wanted:
                table = state.table(ModelRole.TARGET, op.group)
                source = each.blocks[op.group]
                reuse(op.group, num_layers[op.group], source, table, each, rope)
            num_layers[op.group] += 1
        elif isinstance(op, Attend):
            rope = None


def turn_tables(rope: Rope, distance: int) -> tuple[Floats, Floats]:
    """cos and sin ``[rotary_dim / 2]`` of the angles that a key is turned by. What a scaling
    multiplies both with is in the key already."""
    frequencies = inverse_frequencies(rope.spec, sequence_length=0)
    angles = (np.float32(distance) * frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def turn(k_CKd: Floats, rope: Rope, distance: int) -> None:
    """Turn keys in place from their positions to those that lie so far behind."""
    cos, sin = turn_tables(rope, distance)
    part = k_CKd[..., rope.key_start : rope.key_start + rope.spec.rotary_dim]
    half = rope.spec.rotary_dim // 2
    first, second = part[..., :half], part[..., half:]
    if rope.spec.interleaved:
        first, second = part[..., ::2], part[..., 1::2]
    turned = first * cos - second * sin
    second[...] = second * cos + first * sin
    first[...] = turned
