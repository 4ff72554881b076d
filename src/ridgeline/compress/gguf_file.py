"""A GGUF file whose matrices were rounded by a method of `compress`: what is rounded to which
format, and the file itself, from the shards that `quantize` leaves beside it."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.block_forward import Key
from ridgeline.compress.grids import Blocks
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.output import check_identity
from ridgeline.compress.tensors import TensorPlan
from ridgeline.core.errors import InvalidRequestError, ModelFileError
from ridgeline.quant.gguf_encoders import ENCODERS
from ridgeline.weights import SafetensorsFile, expanded, weight_parts, weight_shapes
from ridgeline.weights.conversion import plan_gguf_of
from ridgeline.weights.gguf import GGUFCheckpoint
from ridgeline.weights.gguf.convert import GGUFPlan, write_gguf
from ridgeline.weights.temporary import refuse_existing

_IDENTITY_KEY = "ridgeline.quantization"


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTarget:
    """The file at ``path``, yet to be written."""

    path: Path
    plan: GGUFPlan

    @classmethod
    def of(
        cls, model: LayeredModel, path: Path, gguf_type: str, identity: Mapping[str, Any]
    ) -> "GGUFTarget":
        """``identity`` is kept in the file: `is_finished` compares.

        Raises:
            InvalidRequestError: ``path`` does not end in .gguf, or is there already.
            UnsupportedModelError: GGUF cannot say all of the model.
        """
        if path.suffix.lower() != ".gguf":
            raise InvalidRequestError(f"{path} must end in .gguf.")
        refuse_existing(path)
        plan = plan_gguf_of(model.stored.path, gguf_type, name=path.stem)
        metadata = {**plan.metadata, _IDENTITY_KEY: json.dumps(identity)}
        return cls(path=path, plan=replace(plan, metadata=metadata))

    @staticmethod
    def is_finished(path: Path, identity: Mapping[str, Any]) -> bool:
        """Whether a run of that identity has written the file.

        Raises:
            InvalidRequestError: there is something else.
            SettingsError: it is from a run of another one.
        """
        if not os.path.lexists(path):
            return False
        try:
            with GGUFCheckpoint(path) as file:
                found = json.loads(str(file.metadata[_IDENTITY_KEY]))
        except (KeyError, ValueError, ModelFileError):
            raise InvalidRequestError(
                f"{path} exists already, and quantize did not make it."
            ) from None
        check_identity(path, found, identity)
        return True

    def grid_of(self, name: str, columns: int) -> Blocks | None:
        """That of a weight; ``None`` if its format is a floating-point one."""
        assert columns, "rows are whole blocks"
        encoder = ENCODERS.get(self.plan.format_name(self.plan.places[name].tensor))
        return None if encoder is None else Blocks(encoder=encoder)

    def write(self, model: LayeredModel, plan: TensorPlan, shards: Path) -> int:
        """Write the file: what was rounded from the shards, the rest from the model. Its bytes."""
        paths = write_gguf(self.path, self.plan, self._weights(model, plan, shards))
        return sum(path.stat().st_size for path in paths)

    def _weights(
        self, model: LayeredModel, plan: TensorPlan, shards: Path
    ) -> Iterator[tuple[str, int | None, Any]]:
        rounded: set[Key] = set()
        for path in sorted(shards.glob("*.safetensors")):
            with SafetensorsFile(path) as file:
                for stored in file.names():
                    key = block_key(stored)
                    if key is not None:
                        rounded.add(key)
                        yield *key, file.tensor(stored)
        names = weight_shapes(model.stored.ops).keys()
        others = [name for name in names if name not in plan.quantized]
        for name, index, weight in weight_parts(model.stored, only=others):
            values = expanded(weight, "float32")
            yield name, index, np.ascontiguousarray(values)


_PREFIX = "blocks:"


def block_name(key: Key) -> str:
    """What the blocks of a matrix are called in a shard."""
    return f"{_PREFIX}{key[0]}" + ("" if key[1] is None else f":{key[1]}")


def block_key(name: str) -> Key | None:
    """The matrix whose blocks a shard's tensor is, if it is any's."""
    if not name.startswith(_PREFIX):
        return None
    weight, _, index = name.removeprefix(_PREFIX).partition(":")
    return weight, int(index) if index else None
