"""Settings of the model: where it comes from, and in which numbers it is computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ridgeline.core.checks import check_int
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import float_format, on_load_format
from ridgeline.core.sampling_params import MAX_SEED
from ridgeline.core.settings.reading import Reads, Tries


def _float_format(_name: str, value: str) -> str:
    if value != "auto":
        float_format(value)
    return value


def on_load(_name: str, value: str | None) -> str | None:
    """What weights are quantized to on load; ``None`` for "none".

    Raises:
        SettingsError: there is no such format.
    """
    form = on_load_format(None if value == "none" else value)
    return None if form is None else form.name


def _seed(name: str, value: int) -> int:  # msgspec's bounds end at int64
    check_int(name, value, 0, MAX_SEED, error=SettingsError)
    return value


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, in which numbers.

    Attributes:
        model: a folder, a hub name, or ``None`` for the embedded model.
        revision: branch, tag or commit of a hub name.
        offline: never use the network.
        load_format: auto, or dummy for random weights of the config's shapes.
        strict: an unknown config key is an error, not a warning.
        dtype: float64, float32, bfloat16, float16, or auto for the checkpoint's own.
        quantization: what matrices are quantized to on load (default: none): int8, int4 (a scale
            for each 32 columns), int4-g64, int4-g128, int3 or int2 (cpu), fp8 (a GPU);
            none is the checkpoint's own format. On the cpu executor a checkpoint of as many
            bits keeps them, and what it left in float is quantized: the head.
        adapters: LoRA adapters by name, each a folder in PEFT's layout; a request chooses one.
        chat_template: a template, or the path of a file that holds one, instead of the model's own.
        seed: seeds requests that have none; the same commands give the same text.
    """

    model: str | None = None
    revision: str | None = None
    offline: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    strict: bool = False
    dtype: Annotated[str, Reads(_float_format)] = "auto"
    quantization: Annotated[
        str | None,
        Reads(on_load),
        Tries(values=("int8", "int4", "int4-g64", "int4-g128", "fp8"), effort="repack"),
    ] = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    seed: Annotated[int, Reads(_seed)] = 0
