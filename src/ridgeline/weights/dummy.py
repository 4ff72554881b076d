"""Random weights of a model's true shapes, so that speed can be measured without a checkpoint."""

import hashlib
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from ridgeline.core.arrays import Array, cast, empty, numpy_dtype
from ridgeline.core.op_facts import Role
from ridgeline.core.ops import Op
from ridgeline.core.spec import NormSpec
from ridgeline.core.weight_uses import weight_roles, weight_uses
from ridgeline.weights.matching import weight_shapes
from ridgeline.weights.stacking import RowRanges

# A prime, so that no two rows of a usual width are the same part of the block.
_BLOCK_ELEMENTS = 1_048_573
_EMBEDDING_STD = 0.02


def dummy_weights(ops: Sequence[Op], *, dtype: str, seed: int) -> dict[str, Array]:
    """Random weights for all of ``ops``, by canonical name; see `stream_dummy_weights`."""
    return dict(stream_dummy_weights(ops, dtype=dtype, seed=seed))


def stream_dummy_weights(
    ops: Sequence[Op], *, dtype: str, seed: int, rows: RowRanges | None = None
) -> Iterator[tuple[str, Array]]:
    """Yield (canonical name, random weight) for all of ``ops``; of those in ``rows`` these rows.

    Norm gains are one (stored as zero where the spec has a unit offset), biases zero, embeddings
    normal with deviation 0.02, matrices normal with deviation 1/sqrt(fan in), so that activations
    keep their scale from layer to layer. Each tensor depends on ``seed``, its name, shape and
    ``dtype`` alone, not on its place among the ops.

    Values come from one block of about a million normal numbers, repeated, from another place on
    for each tensor: they are distributed as they should be, but beyond a million elements they are
    not independent. Good for measuring speed and memory, and nothing else.
    """
    generator = np.random.default_rng(_hash("", seed))
    block = generator.standard_normal(_BLOCK_ELEMENTS, dtype=np.float32)
    scaled: dict[float, Array] = {}
    for name, shape, mean, std in dummy_moments(ops):
        first = 0
        if rows and name in rows:
            first, stop = rows[name]
            first, shape = first * prod(shape[1:]), (stop - first, *shape[1:])
        if std == 0:
            yield name, np.full(shape, mean, dtype=numpy_dtype(dtype))
            continue
        if std not in scaled:
            # Twice in a row, so that from any place on a whole block is one slice.
            scaled[std] = np.tile(cast(block * np.float32(std), dtype), 2)
        yield name, _tiled(scaled[std], shape, _hash(name, seed) + first)


def dummy_moments(ops: Sequence[Op]) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Canonical name, shape, mean and deviation of each random weight."""
    constants, embeddings = _constants(ops), _embeddings(ops)
    for name, shape in weight_shapes(ops).items():
        if name in constants:
            yield name, shape, constants[name], 0.0
        else:
            std = _EMBEDDING_STD if name in embeddings else max(shape[-1], 1) ** -0.5
            yield name, shape, 0.0, std


def _constants(ops: Sequence[Op]) -> dict[str, float]:
    """Weights that are not random: norm gains and biases."""
    constants: dict[str, float] = {}
    for op in ops:
        spec = getattr(op, "spec", None)
        has_offset = isinstance(spec, NormSpec) and spec.unit_offset
        for weight, role, *_ in weight_uses(op):
            if role is Role.BIAS:
                constants[weight.name] = 0.0
            elif role is Role.GAIN:
                constants[weight.name] = 0.0 if has_offset else 1.0
    return constants


def _embeddings(ops: Sequence[Op]) -> set[str]:
    roles = weight_roles(ops).items()
    return {name for name, of_weight in roles if any(role.is_table for role in of_weight)}


def _tiled(twice_block: Array, shape: tuple[int, ...], start: int) -> Array:
    """A tensor filled with repetitions of the block, from its element ``start`` on."""
    weight = empty(shape, twice_block.dtype.name)
    flat, offset = weight.reshape(-1), start % _BLOCK_ELEMENTS
    for first in range(0, flat.size, _BLOCK_ELEMENTS):
        target = flat[first : first + _BLOCK_ELEMENTS]
        target[...] = twice_block[offset : offset + target.size]
    return weight


def _hash(name: str, seed: int) -> int:
    """A number below 2^63 that is the same in every process."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
