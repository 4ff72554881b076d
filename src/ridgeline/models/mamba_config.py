"""Config fields and tensor names of Mamba-2's layers, which families call by different names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import Activation, Mamba2Spec, NormSpec
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import TensorSource
from ridgeline.models.fields import FULL, read_activation
from ridgeline.models.tensor_names import layer_tensors

LINEAR = "linear_attention"
_MAX_STATE_DIM = 256  # as the kernels have it
_MAX_CONV_LENGTH = 16
_MAX_HEADS = 2**14
_MAX_WIDTH = 2**20
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}  # before transformers 5.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Keys:
    """What a family's configs call the sizes; ``expand`` times the hidden size is the width of all
    heads, where there is such a key, unless ``width`` says another. ``groups`` and ``states`` are
    defaults."""

    num_heads: str
    head_dim: str
    num_groups: str
    state_dim: str
    conv_length: str
    conv_bias: str
    bias: str
    activation: str = "hidden_act"
    expand: str | None = None
    width: str | None = None
    groups: int = 8
    states: int = 128


def read_mamba2(
    config: ConfigReader, keys: Mamba2Keys, *, hidden_size: int, norm: NormSpec | None
) -> Mamba2Spec:
    """
    Raises:
        CorruptFileError: the sizes do not go together.
        UnsupportedModelError: steps are clamped, or the convolution's activation is not SiLU.
    """
    for name in (
        "chunk_size", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_max", "mamba_dt_min",
        "mamba_ssm_cache_dtype", "rescale_prenorm_residual", "residual_in_fp32",
        "time_step_floor", "time_step_max", "time_step_min", "time_step_rank",
        "use_mamba_kernels",
    ):  # fmt: skip
        config.ignore(name)  # how a state is computed, and how training begins
    _refuse_clamped_steps(config)
    if read_activation(config, keys.activation, default="silu") is not Activation.SILU:
        raise UnsupportedModelError(
            f"config.json sets {keys.activation} to another activation than silu, which the "
            "convolution before the state-space scan has no kernel for."
        )
    num_heads = config.integer(keys.num_heads, maximum=_MAX_HEADS, default=128)
    spec = Mamba2Spec(
        num_heads=num_heads,
        head_dim=_head_dim(config, keys, num_heads, hidden_size),
        num_groups=config.integer(keys.num_groups, maximum=_MAX_HEADS, default=keys.groups),
        state_dim=config.integer(keys.state_dim, maximum=_MAX_STATE_DIM, default=keys.states),
        conv_length=config.integer(
            keys.conv_length, minimum=2, maximum=_MAX_CONV_LENGTH, default=4
        ),
        norm=norm,
        conv_bias=config.boolean(keys.conv_bias, default=True),
        bias=config.boolean(keys.bias, default=False),
    )
    if num_heads % spec.num_groups:
        raise CorruptFileError(
            f"config.json gives {keys.num_heads} as {num_heads}, which is no multiple of "
            f"{keys.num_groups}, {spec.num_groups}."
        )
    return spec


def _head_dim(config: ConfigReader, keys: Mamba2Keys, num_heads: int, hidden_size: int) -> int:
    """Of the heads, which fill the width that is expanded, if there is one."""
    if keys.expand is None:
        return config.integer(keys.head_dim, maximum=_MAX_WIDTH, default=64)
    said_by, width = keys.expand, config.integer(keys.expand, maximum=64, default=2) * hidden_size
    if keys.width is not None and keys.width in config:
        said_by, width = keys.width, config.integer(keys.width, maximum=_MAX_WIDTH)
    if config.raw(keys.head_dim) == "auto" or keys.head_dim not in config:
        head_dim = width // num_heads
    else:
        head_dim = config.integer(keys.head_dim, maximum=_MAX_WIDTH)
    if num_heads * head_dim != width:
        raise CorruptFileError(
            f"config.json gives {num_heads} heads of {head_dim} elements to Mamba-2's layers, "
            f"which are not the {width} that {said_by} says."
        )
    return head_dim


def _refuse_clamped_steps(config: ConfigReader) -> None:
    """transformers clamps the steps of a prompt, and not those of tokens after it."""
    for name in ("time_step_limit", "mamba_dt_limit"):
        limits = config.raw(name)
        if limits is None:
            continue
        if not isinstance(limits, list | tuple) or len(limits) != 2:
            raise CorruptFileError(f"config.json must give {name} as two numbers.")
        low, high = limits
        if isinstance(high, Mapping):  # as transformers writes what JSON has no number for
            high = high.get("__float__")
        if low != 0 or high not in (math.inf, "Infinity"):
            raise UnsupportedModelError(
                f"config.json clamps the steps of the state-space scan: {name} is "
                f"[{show(low)}, {show(high)}], and Ridgeline has them as they are."
            )


def read_hybrid_kinds(config: ConfigReader, num_layers: int, default: str) -> tuple[str, ...]:
    """``FULL`` or ``LINEAR`` of each layer, from ``layer_types`` or ``layers_block_type``."""
    name = "layer_types" if "layer_types" in config else "layers_block_type"
    kinds = tuple(OLD_KINDS.get(kind, kind) for kind in config.texts(name) or ())
    unknown = sorted(set(kinds) - {FULL, LINEAR})
    if unknown:
        raise UnsupportedModelError(
            f"config.json lists {show(unknown[0])} in {name}; supported are {FULL} and {LINEAR}."
        )
    if kinds and len(kinds) != num_layers:
        raise CorruptFileError(f"config.json lists {len(kinds)} {name} for {num_layers} layers.")
    return kinds or (default,) * num_layers


def mamba2_tensors(module: str) -> dict[str, TensorSource]:
    """Where the weights lie whose ``module`` is in a layer, e.g. ``mamba``."""
    prefix = f"model.layers.{{i}}.{module}."
    parts = {"scan_decay_log": "A_log", "scan_step_offset": "dt_bias", "scan_skip": "D"}
    return {
        **layer_tensors(dict.fromkeys(_PROJECTED, f"{module}.in_proj"), bias=True),
        **layer_tensors({"scan_out": f"{module}.out_proj"}, bias=True),
        **layer_tensors({"scan_norm": f"{module}.norm"}),
        "layers.{i}.scan_conv": TensorSource(name=f"{prefix}conv1d.weight", squeeze=True),
        "layers.{i}.scan_conv_bias": TensorSource(name=f"{prefix}conv1d.bias"),
        **{f"layers.{{i}}.{name}": TensorSource(name=prefix + of) for name, of in parts.items()},
    }


def mamba2_fused(module: str) -> Mapping[str, tuple[str, ...]]:
    """The tensors that hold several weights (`Family.fused`)."""
    return {
        f"model.layers.{{i}}.{module}.in_proj.{kind}": tuple(
            f"layers.{{i}}.{name}{suffix}" for name in _PROJECTED
        )
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    }


_PROJECTED = ("scan_gate", "scan_mixed", "scan_step")  # in the order of the tensor's rows
BAMBA_KEYS = Mamba2Keys(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
    num_groups="mamba_n_groups",
    state_dim="mamba_d_state",
    conv_length="mamba_d_conv",
    conv_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
    expand="mamba_expand",
    groups=1,
    states=256,
)
