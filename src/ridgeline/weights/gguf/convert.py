"""From a checkpoint in Hugging Face's layout to GGUF, one matrix in memory at a time."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.gguf_file_types import FILE_TYPES
from ridgeline.core.spec import AttentionSpec
from ridgeline.models import ModelDefinition, TensorSource
from ridgeline.quant.gguf_blocks import Bytes
from ridgeline.quant.gguf_encoders import encode
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.weights.gguf.imatrix import Importance
from ridgeline.weights.gguf.metadata import architecture_content, check_content
from ridgeline.weights.gguf.mixes import fitting_format, mixed_format
from ridgeline.weights.gguf.names import ARCHITECTURES, Architecture, interleaved_rows
from ridgeline.weights.gguf.values import Metadata
from ridgeline.weights.gguf.writer import GGUFTensor, GGUFWriter
from ridgeline.weights.names import short_name

_log = logging.getLogger(__name__)

_Floats = npt.NDArray[np.float32]
_FORMATS = {fmt.name: fmt for fmt in GGUF_FORMATS.values()}
_QUANTIZATION_VERSION = 2  # of ggml's blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a weight goes: the rows of a tensor from ``first_row`` on, ``rows`` for each matrix."""

    tensor: str
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFPlan:
    """A GGUF file that is yet to be written. It has the face of `GGUFContent`.

    Attributes:
        metadata: all keys.
        tensors: in the order of the file.
        small: the values of tensors that say what a config says.
        places: where each weight of the model goes.
        heads: of ``attn_q`` and ``attn_k``, where their rows are interleaved.
    """

    metadata: Metadata
    tensors: tuple[GGUFTensor, ...]
    small: Mapping[str, _Floats]
    places: Mapping[str, Place]
    heads: Mapping[str, int]
    norm_offset: float

    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors if tensor.name not in self.small)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def vector(self, name: str) -> _Floats | None:
        return self.small.get(name)

    def format_name(self, name: str) -> str:
        return self._tensor(name).format.name

    def _tensor(self, name: str) -> GGUFTensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)


def plan_gguf(
    definition: ModelDefinition,
    config: Mapping[str, Any],
    file_type: str,
    *,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    tokenizer: Metadata,
    importance: Importance | None = None,
) -> GGUFPlan:
    """What the GGUF file of a model will be.

    ``shapes`` are those of all its weights, by canonical name; ``tokenizer`` are its keys.

    Raises:
        UnsupportedModelError: GGUF cannot say all of the model; names what.
    """
    content = architecture_content(definition, config)
    architecture = ARCHITECTURES[content.architecture]
    rows_of, places = _placed(shapes, definition, architecture)
    spec = definition.spec
    mixed = {
        tensor: mixed_format(tensor, shape, file_type, spec, with_importance=importance is not None)
        for tensor, shape in rows_of.items()
    }
    fitting = {tensor: fitting_format(mixed[tensor], rows_of[tensor][-1]) for tensor in mixed}
    _tell_fallbacks(file_type, mixed, fitting)
    tensors = [
        GGUFTensor(name=tensor, shape=shape, format=_FORMATS[fitting[tensor]])
        for tensor, shape in rows_of.items()
    ]
    small = {tensor: values.reshape(-1) for tensor, values in content.tensors.items()}
    tensors += [
        GGUFTensor(name=tensor, shape=values.shape, format=_FORMATS["F32"])
        for tensor, values in small.items()
    ]
    metadata: dict[str, object] = {
        "general.architecture": content.architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[file_type].number,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **content.metadata,
        **tokenizer,
        **({} if importance is None else importance.metadata()),
    }
    attention = spec.layers[0].attention
    heads: dict[str, int] = {}
    if architecture.interleaved:
        assert isinstance(attention, AttentionSpec)
        heads = {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads}
    plan = GGUFPlan(
        metadata=metadata,
        tensors=tuple(tensors),
        small=small,
        places=places,
        heads=heads,
        norm_offset=architecture.norm_offset,
    )
    check_content(plan, definition)
    if importance is not None:
        importance.check(plan)
    return plan


def _tell_fallbacks(file_type: str, mixed: Mapping[str, str], fitting: Mapping[str, str]) -> None:
    """Say how many matrices have another format than the mix says, and which."""
    changed = Counter(
        (mixed[each], fitting[each]) for each in mixed if mixed[each] != fitting[each]
    )
    if changed:
        _log.warning(
            "Rows of %d of %d matrices are no whole blocks of %s: %s.",
            changed.total(),
            sum(form != "F32" for form in fitting.values()),
            file_type,
            ", ".join(
                f"{n} are {new} in place of {old}" for (old, new), n in changed.most_common()
            ),
        )


def write_gguf(
    path: Path,
    plan: GGUFPlan,
    weights: Iterator[tuple[str, int | None, _Floats | Bytes]],
    *,
    importance: Importance | None = None,
    split_max_bytes: int | None = None,
) -> list[Path]:
    """Write the file, and give its path, or those of its parts.

    ``weights`` are all weights of the model, each with its index in its stack if it is one matrix
    of that, in any order; those that are bytes are rows of blocks already.

    Raises:
        InvalidRequestError, DiskError: as `GGUFWriter`.
        UnsupportedModelError: a weight is not finite, or does not fit its format.
    """
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    with GGUFWriter(path, plan.metadata, plan.tensors, split_max_bytes=split_max_bytes) as writer:
        for name, values in plan.small.items():
            writer.write(name, 0, encode("F32", values[:, None]))
        for weight, index, matrix in weights:
            place = plan.places[weight]
            tensor = tensors[place.tensor]
            rows = _as_stored(plan, tensor, matrix)
            first = place.first_row + (index or 0) * place.rows
            if rows.dtype == np.uint8:
                writer.write(tensor.name, first, rows)
                continue
            columns = (
                None if importance is None else importance.of(tensor.name, rows.shape[-1], index)
            )
            try:
                blocks = encode(tensor.format.name, rows, columns)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(
                    f"The weight {short_name(weight)} {error}; it cannot be written as "
                    f"{tensor.format.name}."
                ) from None
            writer.write(tensor.name, first, blocks)
    return writer.paths


def _placed(
    shapes: Mapping[str, tuple[int, ...]], definition: ModelDefinition, architecture: Architecture
) -> tuple[dict[str, tuple[int, ...]], dict[str, Place]]:
    """The shape of each tensor, and which of its rows each weight is."""
    as_gguf = replace(
        definition,
        family=replace(
            definition.family, tensors=architecture.tensors, fused=architecture.fused, ignored=()
        ),
    )
    sources: Mapping[str, TensorSource] = as_gguf.sources
    found: dict[str, tuple[int, ...]] = {}
    places: dict[str, Place] = {}
    for weight, shape in shapes.items():
        if weight not in sources:
            raise UnsupportedModelError(f"GGUF has no place for the weight {weight} of this model.")
        source = sources[weight]
        start, stop = source.rows or (0, shape[0])
        rows = shape[0] if len(shape) == 1 else shape[-2]
        places[weight] = Place(tensor=source.name, first_row=start, rows=rows)
        known = found.get(source.name)
        height = max(stop, 0 if known is None else known[0])
        found[source.name] = (height, *shape[1:])
    return found, places


def _as_stored(plan: GGUFPlan, tensor: GGUFTensor, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows of a weight as converters write them: `GGUFCheckpoint` undoes it."""
    if tensor.name.endswith("norm.weight"):
        values = values + np.float32(plan.norm_offset)
    module = tensor.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if module in plan.heads:
        values = values[interleaved_rows(len(values), plan.heads[module])]
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values[:, None]
