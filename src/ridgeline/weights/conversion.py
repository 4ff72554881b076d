"""Models from one file format to another: safetensors to GGUF, GGUF to safetensors, and dtypes."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import InvalidRequestError, UnsupportedModelError
from ridgeline.core.ops import Op
from ridgeline.models import ModelDefinition, TensorSource, describe, lower, read_config
from ridgeline.quant import Scheme, read_scheme
from ridgeline.quant.gguf_encoders import encode
from ridgeline.text import Tokenizer
from ridgeline.text.gguf_metadata import gguf_metadata
from ridgeline.text.gguf_tokenizer import tokenizer_from_gguf
from ridgeline.text.tokenizer_files import has_tokenizer
from ridgeline.weights.files import CONFIG_NAME, INDEX_NAME
from ridgeline.weights.gguf import GGUFCheckpoint, describe_gguf
from ridgeline.weights.gguf.config import config_of
from ridgeline.weights.gguf.convert import GGUFPlan, plan_gguf, write_gguf
from ridgeline.weights.gguf.imatrix import Importance
from ridgeline.weights.matching import weight_shapes
from ridgeline.weights.names import short_name
from ridgeline.weights.packed import expanded
from ridgeline.weights.progress import Progress
from ridgeline.weights.safetensors_writer import SafetensorsTensor, SafetensorsWriter
from ridgeline.weights.source import CheckpointWeights
from ridgeline.weights.temporary import copy_durably, refuse_existing, write_json

_Floats = npt.NDArray[np.float32]
_log = logging.getLogger(__name__)
_Parts = Iterator[tuple[str, int | None, _Floats]]


def convert_to_gguf(
    folder: Path,
    out: Path,
    file_type: str,
    *,
    name: str,
    importance: Importance | None = None,
    split_max_bytes: int | None = None,
    requantize: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the model in ``folder`` as GGUF; gives the path, or those of all parts.

    ``file_type`` is one of `FILE_TYPES`, ``name`` the model's for ``general.name``. A model that is
    quantized already is refused unless ``requantize``.

    Raises:
        InvalidRequestError: ``out`` exists, or ``importance`` is of another model.
        ModelFileError: the model is damaged, or GGUF cannot say all of it.
        DiskError: a file cannot be read or written.
    """
    refuse_existing(out)
    definition = describe(read_config(folder))
    scheme = None
    if definition.quantization is not None:
        if not requantize:
            raise InvalidRequestError(
                f"{folder} is quantized already: what one rounding lost, a second one does not "
                "bring back. Take the unquantized model, or ask for it with --requantize."
            )
        scheme = read_scheme(definition.quantization, strict=False)
    plan = plan_gguf_of(folder, file_type, name=name, importance=importance)
    weights = _weights(folder, lower(definition.spec), definition, scheme, progress)
    return write_gguf(out, plan, weights, importance=importance, split_max_bytes=split_max_bytes)


def plan_gguf_of(
    folder: Path, file_type: str, *, name: str, importance: Importance | None = None
) -> GGUFPlan:
    """What the GGUF file of the model in ``folder`` will be; see `convert_to_gguf`."""
    config = read_config(folder)
    definition = describe(config)
    tokenizer: dict[str, object] = {"tokenizer.ggml.model": "none"}
    if has_tokenizer(folder):
        tokenizer = gguf_metadata(Tokenizer.from_folder(folder), definition.spec.vocab_size)
    else:
        _log.warning("%s has no tokenizer, and so the GGUF file will have none.", folder)
    return plan_gguf(
        definition,
        config,
        file_type,
        name=name,
        shapes=weight_shapes(lower(definition.spec)),
        tokenizer=tokenizer,
        importance=importance,
    )


def _weights(
    path: Path,
    ops: Sequence[Op],
    definition: ModelDefinition,
    scheme: Scheme | None,
    progress: Progress | None,
) -> _Parts:
    """All weights in float32, stacks one matrix at a time."""
    weights = CheckpointWeights(
        path=path,
        ops=ops,
        sources=definition.sources,
        ignored=definition.ignored,
        dtype="float32",
        quantization=scheme,
        progress=progress,
    )
    for name, index, weight in weights.parts():
        yield name, index, expanded(weight, "float32")
        del weight  # before the next one is read


def convert_to_safetensors(
    path: Path, out: Path, dtype: str | None = None, *, progress: Progress | None = None
) -> None:
    """Write the model at ``path``, a GGUF file or a folder, as a folder of safetensors.

    ``dtype`` is float32, float16 or bfloat16; without it the model's own. Quantized weights are
    expanded. Of a folder, all other files but the weights are copied.

    Raises:
        InvalidRequestError: ``out`` exists.
        ModelFileError: the model is damaged, or a weight does not fit ``dtype``.
        DiskError: a file cannot be read or written.
    """
    refuse_existing(out)
    if path.is_dir():
        config = read_config(path)
        definition, scheme = describe(config), None
        if definition.quantization is not None:
            scheme = read_scheme(definition.quantization, strict=False)
        target = definition
    else:
        scheme = None
        with GGUFCheckpoint(path) as checkpoint:
            definition = describe_gguf(checkpoint)
            config = config_of(checkpoint, str(checkpoint.metadata["general.architecture"]))
            tokenizer = tokenizer_from_gguf(checkpoint.metadata)
        target = describe(config)
    dtype = dtype or target.dtype
    ops = lower(definition.spec)
    places = _places(weight_shapes(ops), target)
    tensors = _tensors(places, SAFETENSORS_DTYPES[dtype])
    weights = _weights(path, ops, definition, scheme, progress)
    with SafetensorsWriter(out, tensors) as writer:
        _write_weights(writer, weights, places, SAFETENSORS_DTYPES[dtype])
        settings = {name: value for name, value in config.items() if name not in _OF_WEIGHTS}
        write_json(writer.folder / CONFIG_NAME, settings | {_dtype_key(config): dtype})
        if path.is_dir():
            _copy_others(path, writer.folder)
        elif tokenizer is not None:
            _write_tokenizer(writer.folder, tokenizer)


SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_OF_WEIGHTS = ("quantization_config", "torch_dtype", "dtype")


def _dtype_key(config: Mapping[str, object]) -> str:
    """transformers calls it ``dtype`` since version 5; older configs stay as they are."""
    return "dtype" if "dtype" in config else "torch_dtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a weight, or a matrix of a stack, goes: rows of a tensor, which may be transposed."""

    tensor: str
    shape: tuple[int, ...]
    first_row: int
    transpose: bool


def _places(
    shapes: Mapping[str, tuple[int, ...]], definition: ModelDefinition
) -> dict[tuple[str, int | None], _Place]:
    """By weight, and index for stacks that lie in tensors apart."""
    places: dict[tuple[str, int | None], _Place] = {}
    for name, shape in shapes.items():
        source = definition.sources[name]
        cuts_stack = source.rows is not None and len(shape) == 3
        if source.every_other is not None or source.of_each is not None or cuts_stack:
            raise UnsupportedModelError(
                f"Models of type {definition.spec.model_type} are not written as safetensors."
            )
        apart = "{e}" in source.name
        for index in range(shape[0]) if apart else (None,):
            place = source if index is None else source.of_expert(index)
            places[name, index] = _Place(
                tensor=place.name,
                shape=_stored_shape(shape, place) if index is None else shape[1:],
                first_row=0 if place.rows is None else place.rows[0],
                transpose=place.transpose,
            )
    return places


def _stored_shape(shape: tuple[int, ...], source: TensorSource) -> tuple[int, ...]:
    return (shape[0], 1, *shape[1:]) if source.squeeze else shape


def _tensors(
    places: Mapping[tuple[str, int | None], _Place], dtype: str
) -> list[SafetensorsTensor]:
    heights: dict[str, int] = {}
    for place in places.values():
        height = place.first_row + place.shape[0]
        heights[place.tensor] = max(height, heights.get(place.tensor, 0))
    shapes = {}
    for place in places.values():
        shape = (heights[place.tensor], *place.shape[1:])
        turned = (*shape[:-2], shape[-1], shape[-2]) if place.transpose else shape
        shapes[place.tensor] = turned
    return [SafetensorsTensor(name=name, dtype=dtype, shape=s) for name, s in shapes.items()]


def _write_weights(
    writer: SafetensorsWriter,
    weights: _Parts,
    places: Mapping[tuple[str, int | None], _Place],
    dtype: str,
) -> None:
    turned: dict[str, tuple[_Floats, int]] = {}  # what is transposed is written when it is whole
    for name, index, values in weights:
        apart = (name, index) in places
        place = places[name, index if apart else None]
        if place.transpose:
            shape = writer.shape(place.tensor)
            whole, missing = turned.pop(place.tensor, (np.empty(shape, np.float32), None))
            missing = whole.size if missing is None else missing
            target = whole if apart or index is None else whole[index]
            stop = place.first_row + values.shape[-2]
            target[..., place.first_row : stop] = values.swapaxes(-1, -2)
            if missing - values.size:
                turned[place.tensor] = whole, missing - values.size
                continue
            writer.write(place.tensor, 0, _encoded(place.tensor, dtype, whole))
            continue
        first = place.first_row if apart or index is None else index
        writer.write(place.tensor, first, _encoded(name, dtype, values))
    assert not turned


def _encoded(name: str, dtype: str, values: _Floats) -> npt.NDArray[np.uint8]:
    try:
        return encode(dtype, values.reshape(1, -1))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"The weight {short_name(name)} {error}.") from None


def _copy_others(source: Path, folder: Path) -> None:
    """All files of a model folder but its weights and its config."""
    for file in source.iterdir():
        is_weights = file.suffix in (".safetensors", ".bin", ".gguf") or file.name == INDEX_NAME
        if file.is_file() and not is_weights and file.name != CONFIG_NAME:
            copy_durably(file, folder / file.name)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_json()))
    config: dict[str, Any] = dict(tokenizer.special_tokens)
    template = tokenizer.chat_template
    if isinstance(template, str):
        config["chat_template"] = template
    elif template is not None:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in template.items()
        ]
    write_json(folder / "tokenizer_config.json", config)
    ends = sorted(tokenizer.eos_token_ids)
    if ends:
        write_json(folder / "generation_config.json", {"eos_token_id": ends})
