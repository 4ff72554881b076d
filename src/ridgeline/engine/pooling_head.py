"""What comes after a pooled hidden state: dense layers, a length of 1, or a classifier's scores.

They are a vector's products with a few matrices, once a text: NumPy, in single precision.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import WeightsMismatchError
from ridgeline.core.pooling import DenseSpec, PoolingSpec, Squash
from ridgeline.weights import Checkpoint
from ridgeline.weights.names import short_name

Vector = npt.NDArray[np.float32]

_TINY = 1e-12


def squashed(x: Vector, squash: Squash) -> Vector:
    """An activation, of each element."""
    match squash:
        case Squash.IDENTITY:
            return x
        case Squash.TANH:
            return np.tanh(x)
        case Squash.GELU:
            erf = np.array([math.erf(each / math.sqrt(2)) for each in x.tolist()])
            return np.array(0.5 * x * (1.0 + erf), dtype=np.float32)
        case Squash.RELU:
            return np.maximum(x, np.float32(0))
        case Squash.SIGMOID:
            return np.array(1.0 / (1.0 + np.exp(-x.astype(np.float64))), dtype=np.float32)


class _Layer(NamedTuple):
    spec: DenseSpec
    weight: npt.NDArray[np.float32]  # [width, in]
    bias: Vector | None
    norm: tuple[Vector, ...]


class PoolingHead:
    """From a pooled hidden state ``[hidden]`` to an embedding, or to a classifier's scores."""

    def __init__(self, spec: PoolingSpec, layers: Sequence[_Layer] = ()) -> None:
        self._spec, self._layers = spec, tuple(layers)

    @classmethod
    def load(cls, folder: Path | None, spec: PoolingSpec, hidden_size: int) -> "PoolingHead":
        """Read its matrices from a model's folder; the first takes ``hidden_size`` numbers.

        Raises:
            ModelFileError: they are missing, damaged, or of another shape.
        """
        if spec.refusal is not None or not spec.layers:
            return cls(spec)
        assert folder is not None
        widths = [hidden_size, *(layer.width for layer in spec.layers)]
        layers = zip(spec.layers, widths, strict=False)
        return cls(spec, [_read(folder, layer, width) for layer, width in layers])

    def __call__(self, pooled: Vector) -> Vector:
        """The embedding, float32 ``[width]``, or the scores ``[labels]``, which are relevances."""
        x = pooled
        for layer in self._layers:
            x = layer.weight @ x
            if layer.bias is not None:
                x = x + layer.bias
            x = squashed(x, layer.spec.squash)
            if layer.norm:
                x = _normed(x, layer)
        if self._spec.num_labels is not None:
            return squashed(x, self._spec.score)
        if self._spec.normalize:
            return x / max(float(np.linalg.norm(x)), _TINY)
        return x


def _normed(x: Vector, layer: _Layer) -> Vector:
    centred = x - x.mean()
    out = centred / np.sqrt((centred * centred).mean() + layer.spec.norm_eps) * layer.norm[0]
    return np.array(out + layer.norm[1] if len(layer.norm) > 1 else out, dtype=np.float32)


def _read(folder: Path, spec: DenseSpec, num_inputs: int) -> _Layer:
    with Checkpoint(folder / spec.path) as checkpoint:
        names = set(checkpoint.names())

        def read(candidates: Sequence[str], check: Callable[[tuple[int, ...]], bool]) -> Vector:
            name = next((each for each in candidates if each in names), None)
            if name is None:
                raise WeightsMismatchError(
                    f"{folder / spec.path} lacks {short_name(candidates[0])}, which its pooling "
                    "needs."
                )
            if not check(checkpoint.shape(name)):
                raise WeightsMismatchError(
                    f"{short_name(name)} is {list(checkpoint.shape(name))}, which does not fit "
                    f"{num_inputs} inputs and {spec.width} outputs."
                )
            if not spec.rows:
                out = np.empty(checkpoint.shape(name), dtype=np.float32)
                checkpoint.read_into(name, out)
                return out
            some = [np.empty((1, checkpoint.shape(name)[1]), dtype=np.float32) for _ in spec.rows]
            for row, out in zip(spec.rows, some, strict=True):
                checkpoint.read_into(name, out, first_row=row)
            return some[0] - some[1] if len(some) > 1 else some[0]

        is_vector = lambda shape: shape == (spec.width,)  # noqa: E731
        is_matrix = lambda shape: (  # noqa: E731
            len(shape) == 2
            and shape[1] == num_inputs
            and (shape[0] > max(spec.rows) if spec.rows else shape[0] == spec.width)
        )
        return _Layer(
            spec,
            read(spec.weight, is_matrix),
            None if spec.bias is None else read(spec.bias, is_vector),
            tuple(read((name,), is_vector) for name in spec.norm),
        )
