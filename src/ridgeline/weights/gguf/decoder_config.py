"""What builders of configs from GGUF metadata share."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.fields import FULL, SLIDING
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys
from ridgeline.weights.gguf.rope import rope_scaling
from ridgeline.weights.gguf.values import Metadata

Config = dict[str, object]
MAX_LAYERS = 4096


class GGUFContent(Protocol):
    """What a GGUF file says of its model: `GGUFCheckpoint`, or a file that is yet to be written."""

    @property
    def metadata(self) -> Metadata:
        """All keys."""
        ...

    def names(self) -> tuple[str, ...]:
        """The names of the weights."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``."""
        ...

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        """The values of tensor ``name``, flat, or ``None`` if there is none."""
        ...

    def format_name(self, name: str) -> str:
        """What tensor ``name`` is stored in, such as Q4_K."""
        ...


def read_head_dim(keys: Keys) -> int:
    """The width of a head, of K as of V."""
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer(
        "attention.key_length", default=max(1, keys.integer("embedding_length") // heads)
    )
    if keys.integer("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(
            "The GGUF file gives keys and values of different widths, which is not supported."
        )
    return head_dim


DECODER_SIZES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings",
)  # fmt: skip
GPT2_SIZES = ("n_embd", "n_layer", "n_head", "n_inner", "n_positions")


def integers(keys: Keys, names: Iterable[str]) -> Config:
    """Fields of a config that every file has."""
    return {name: keys.integer(CONFIG_KEYS[name]) for name in names}


def decoder(keys: Keys, *, norm: Config | None = None, head_dim: int | None = None) -> Config:
    """What Llama and its relatives have in common.

    ``norm`` is what says the epsilon of norms where they are no RMSNorms; ``head_dim`` the width
    that rotary positions are of, where that is not a head's.
    """
    heads, head_dim = (
        keys.integer(CONFIG_KEYS["num_attention_heads"]),
        head_dim or read_head_dim(keys),
    )
    theta = keys.number(CONFIG_KEYS["rope_theta"], default=10_000.0)
    if not 2.0 <= theta <= 1e15:
        raise CorruptFileError(f"The GGUF file gives a rope.freq_base of {theta:g}.")
    rotated = keys.integer("rope.dimension_count", default=head_dim)
    config: Config = integers(keys, DECODER_SIZES) | {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer(CONFIG_KEYS["num_key_value_heads"], default=heads),
        "head_dim": head_dim,
        "rope_theta": theta,
    }
    config |= {"rms_norm_eps": keys.number(CONFIG_KEYS["rms_norm_eps"])} if norm is None else norm
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return config


def with_scaling(config: Config, keys: Keys, checkpoint: GGUFContent) -> Config:
    """``config`` with the scaling of rotary positions, if the file has one."""
    head_dim, theta = config["head_dim"], config["rope_theta"]
    assert isinstance(head_dim, int)
    assert isinstance(theta, float)
    factors = checkpoint.vector("rope_freqs.weight") if head_dim % 2 == 0 else None
    scaling = rope_scaling(keys, factors, head_dim=head_dim, theta=theta)
    return config if scaling is None else config | {"rope_scaling": scaling}


def with_growth(config: Config, keys: Keys) -> Config:
    """``config``, whose queries grow with their position if the file says so; by YaRN's length."""
    rate = keys.number("attention.temperature_scale", default=0.0)
    if not rate:
        return config
    scaling, name = config.get("rope_scaling"), "original_max_position_embeddings"
    original = scaling.get(name) if isinstance(scaling, dict) else None
    length = keys.integer("attention.temperature_length", default=0, minimum=0)
    if original is None or length not in (0, original):
        raise UnsupportedModelError(
            "The GGUF file lets queries grow (attention.temperature_scale) by a length of "
            f"{length or 'no YaRN'}; supported is that of YaRN, {original or 'which it lacks'}."
        )
    assert isinstance(scaling, dict)
    return config | {"rope_scaling": scaling | {"llama_4_scaling_beta": rate}}


def layer_types(keys: Keys, num_layers: int, *, default: int) -> list[str]:
    """Each ``default``-th layer sees everything, unless the file has a pattern of its own."""
    if num_layers > MAX_LAYERS:
        raise CorruptFileError(f"The GGUF file claims {num_layers} layers.")
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.shape != (num_layers,):
            raise CorruptFileError(
                f"The GGUF file has a sliding_window_pattern of {pattern.size} for {num_layers} "
                "layers."
            )
        return [SLIDING if windowed else FULL for windowed in pattern.tolist()]
    every = keys.integer("attention.sliding_window_pattern", default=default)
    return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]


def for_each_layer(keys: Keys, name: str) -> tuple[int, ...]:
    """A whole number for each layer, of which some may be 0."""
    layers, value = keys.integer("block_count"), keys.get(name)
    if layers > MAX_LAYERS:
        raise CorruptFileError(f"The GGUF file claims {layers} layers.")
    if not isinstance(value, np.ndarray):
        return (keys.integer(name, minimum=0),) * layers
    if value.shape != (layers,) or value.dtype.kind not in "iu" or (value < 0).any():
        raise CorruptFileError(
            f"The GGUF file must give {keys.architecture}.{name} as {layers} whole numbers."
        )
    return tuple(value.tolist())
