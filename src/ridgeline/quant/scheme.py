"""What an on-disk scheme tells the loader: which tensors together are which weight.

A scheme reads its part of the config, looks at the names, shapes and dtypes of a checkpoint, and
plans: each weight that it stores in parts becomes one `StoredWeight`, which stands for a tensor of
an unquantized checkpoint. All shapes are checked by then; values are read only by ``assemble``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.core.arrays import Array
from ridgeline.core.errors import WeightsMismatchError
from ridgeline.quant.tensor import QuantizedTensor

Read = Callable[[str], Array]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the checkpoint; ``dtype`` is ``None`` if Ridgeline cannot read it."""

    shape: tuple[int, ...]
    dtype: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One weight in parts.

    Attributes:
        name: of the tensor that it stands for, such as ``model.layers.0.mlp.up_proj.weight``.
        shape: of that tensor.
        parts: the tensors that it consists of.
        assemble: reads them; raises `CorruptFileError` for values that cannot be.
        transposed: the tensor that it stands for has ``in`` before ``out``.
        by_expert: the first axis of every part is the experts, so that ``assemble`` can be given
            those of some experts, and gives their weights.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    assemble: Callable[[Read], QuantizedTensor]
    transposed: bool = False
    by_expert: bool = False


@dataclass(slots=True, kw_only=True)
class StoragePlan:
    """The weights in parts, the tensors that may be left over, and what the user should know."""

    weights: list[StoredWeight] = field(default_factory=list)
    spare: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class Scheme(Protocol):
    """A checkpoint's ``quantization_config``, understood."""

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        """Which tensors make which weight. ``read`` is for tensors of a few bytes.

        Raises:
            WeightsMismatchError: parts are missing or do not fit together.
            UnsupportedModelError, CorruptFileError: a part says what cannot be done, or cannot be.
        """
        ...


class Module:
    """The tensors below one prefix, each looked up with what it must be."""

    def __init__(self, tensors: Mapping[str, TensorInfo], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.parts: list[str] = []

    def has(self, suffix: str) -> bool:
        return self.prefix + suffix in self.tensors

    def part(
        self, suffix: str, *dtypes: str, shape: tuple[int | None, ...] | None = None
    ) -> tuple[int, ...]:
        """Note a part that must be there, and return its shape; ``None`` matches any extent."""
        name = self.prefix + suffix
        info = self.tensors.get(name)
        if info is None:
            raise WeightsMismatchError(f"The quantized weight {self} has no {suffix!a} part.")
        if info.dtype not in dtypes:
            wanted = " or ".join(dtypes)
            raise WeightsMismatchError(
                f"The part {suffix!a} of the quantized weight {self} must be {wanted}, and "
                f"it is {info.dtype or 'of a dtype that Ridgeline cannot read'}."
            )
        if shape is not None and not _fits(info.shape, shape):
            wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
            raise WeightsMismatchError(
                f"The part {suffix!a} of the quantized weight {self} must have the shape "
                f"[{wanted}], and it has {list(info.shape)[:8]}."
            )
        self.parts.append(name)
        return info.shape

    def mismatch(self, what: str) -> WeightsMismatchError:
        return WeightsMismatchError(f"The quantized weight {self} {what}.")

    def stored(
        self,
        suffix: str,
        shape: tuple[int, ...],
        assemble: Callable[[Read], QuantizedTensor],
        *,
        transposed: bool = False,
        by_expert: bool = False,
    ) -> StoredWeight:
        """The weight ``prefix + suffix`` of the parts noted so far."""
        return StoredWeight(
            name=self.prefix + suffix,
            shape=shape,
            parts=tuple(self.parts),
            assemble=assemble,
            transposed=transposed,
            by_expert=by_expert,
        )

    def __str__(self) -> str:
        return ascii(self.prefix if len(self.prefix) <= 80 else f"{self.prefix[:77]}...")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or extent == want for extent, want in zip(shape, wanted, strict=True)
    )


def modules_with(tensors: Mapping[str, TensorInfo], suffix: str) -> list[Module]:
    """The modules that have a tensor of that suffix, in file order."""
    prefixes = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return [Module(tensors, prefix) for prefix in prefixes]
