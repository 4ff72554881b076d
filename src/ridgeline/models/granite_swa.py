"""Granite with windows (IBM, 2026): sinks, rotary positions in some layers; with experts too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import AttentionSpec, LayerSpec, ModelSpec
from ridgeline.models import granite, granitemoe
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import TensorSource
from ridgeline.models.fields import FULL, SLIDING, layer_windows, read_layer_kinds
from ridgeline.models.tensor_names import fused_tensors, layer_tensors

_MAX_THETA = 1e15


def _with_windows(
    build: Callable[[ConfigReader], ModelSpec],
) -> Callable[[ConfigReader], ModelSpec]:
    """Three layers of four have a window, unless ``layer_types`` says otherwise; of
    ``layer_rope_theta`` 0 stands for a layer without rotary positions."""

    def build_with_windows(config: ConfigReader) -> ModelSpec:
        spec = build(config)
        default = [SLIDING if layer % 4 else FULL for layer in range(len(spec.layers))]
        kinds = read_layer_kinds(config, len(spec.layers), default)
        windows = layer_windows(kinds, config.optional_integer("sliding_window", default=128))
        thetas: Sequence[float | None] | None = config.numbers(
            "layer_rope_theta", minimum=0.0, maximum=_MAX_THETA
        )
        if thetas is None:
            thetas = [None] * len(spec.layers)
        if len(thetas) != len(spec.layers):
            raise CorruptFileError(
                f"config.json lists {len(thetas)} layer_rope_theta for {len(spec.layers)} layers."
            )
        layers = map(_layer, spec.layers, windows, thetas)
        return replace(spec, model_type=config.text("model_type"), layers=tuple(layers))

    return build_with_windows


def _layer(layer: LayerSpec, window: int | None, theta: float | None) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    rope = _turned(layer.attention.rope, theta)
    return replace(layer, attention=replace(layer.attention, window=window, sinks=True, rope=rope))


def _turned(rope: RopeSpec | None, theta: float | None) -> RopeSpec | None:
    """``rope`` by a base of the layer's own, if it has one."""
    if theta is None or rope is None:
        return rope
    if 0 < theta < 2:
        raise CorruptFileError(f"config.json gives a layer_rope_theta of {theta:g}.")
    return replace(rope, theta=theta) if theta else None


_SINKS = {"layers.{i}.sinks": TensorSource(name="model.layers.{i}.self_attn.sinks")}
_EXPERTS = "model.layers.{i}.block_sparse_moe"
_GATE_UP: Mapping[str, tuple[str, ...]] = {
    f"{_EXPERTS}.experts.gate_up_proj": ("layers.{i}.experts.gate", "layers.{i}.experts.up")
}
FAMILY = replace(
    granite.FAMILY,
    model_type="granite_swa",
    build=_with_windows(granite.build),
    tensors={**granite.FAMILY.tensors, **_SINKS},
)
FAMILY_MOE = replace(
    granitemoe.WITH_SHARED_EXPERT,
    model_type="granitemoe_swa",
    build=_with_windows(granitemoe.build),
    tensors={
        **granitemoe.FAMILY.tensors,
        **_SINKS,
        **fused_tensors(_GATE_UP),
        **layer_tensors({"router": "block_sparse_moe.router"}),
        "layers.{i}.experts.down": TensorSource(name=f"{_EXPERTS}.experts.down_proj"),
    },
    fused={**granitemoe.FAMILY.fused, **_GATE_UP},
)
