"""Typed access to the metadata of a GGUF file, with errors that name the key."""

import math
from collections.abc import Mapping

import numpy as np

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.config import show
from ridgeline.weights.gguf.values import Metadata

_MAX_INTEGER = 2**31 - 1

CONFIG_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_inner": "feed_forward_length",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
"""Fields of a ``config.json`` whose values are those of a key, as they are, read and written."""


class Keys:
    """The keys of one architecture: ``name`` stands for ``{architecture}.{name}``.

    Getters raise `CorruptFileError` for a value of the wrong type, out of bounds, or absent without
    a default.
    """

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self._metadata = metadata
        self.architecture = architecture

    def get(self, name: str) -> object:
        """The value as it is, ``None`` if there is none."""
        return self._metadata.get(f"{self.architecture}.{name}")

    def with_values(self, values: Mapping[str, object]) -> "Keys":
        """These keys with others in place of some, by their names here."""
        changed = {f"{self.architecture}.{name}": value for name, value in values.items()}
        return Keys({**self._metadata, **changed}, self.architecture)

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        """A whole number from ``minimum`` to 2³¹ − 1."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray | list):
            raise UnsupportedModelError(
                f"The GGUF file gives {self.architecture}.{name} for each layer, which is not "
                "supported."
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        if not minimum <= value <= _MAX_INTEGER:
            raise self._wrong(name, value, f"between {minimum} and {_MAX_INTEGER}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """A finite number; float32 is read as the shortest decimal that it stands for."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not math.isfinite(value):
            raise self._wrong(name, value, "finite")
        if abs(value) < 1e38 and float(np.float32(value)) == value:
            return float(str(np.float32(value)))
        return float(value)

    def text(self, name: str, *, default: str) -> str:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def _wrong(self, name: str, value: object, expected: str) -> CorruptFileError:
        told = "absent" if value is None else show(value)
        return CorruptFileError(
            f"The GGUF file must give {self.architecture}.{name} as {expected}, and it is {told}."
        )
