"""The config of a GGUF file of Gemma 3n; for sources `dense_configs`."""

from statistics import NormalDist

import numpy as np

from ridgeline.core.errors import CorruptFileError
from ridgeline.weights.gguf.decoder_config import (
    Config,
    GGUFContent,
    decoder,
    for_each_layer,
    layer_types,
)
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys

_MLP_WIDTH = CONFIG_KEYS["intermediate_size"]
_LAYER_EMBED, _LAUREL = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"


def gemma3n(keys: Keys, content: GGUFContent) -> Config:
    """What llama.cpp takes for granted is not in the file: half of the frequencies, and that the
    first stream's scale is used."""
    layers, names = keys.integer("block_count"), content.names()
    kinds = layer_types(keys, layers, default=5)
    widths = for_each_layer(keys, _MLP_WIDTH)
    if 0 in widths or not {_LAYER_EMBED, _LAUREL} <= set(names):
        raise CorruptFileError("The GGUF file of Gemma 3n has layers without a network or branch.")
    return decoder(keys.with_values({_MLP_WIDTH: widths[0]})) | {
        "model_type": "gemma3n_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": widths,
        "layer_types": kinds,
        "sliding_window": keys.integer(CONFIG_KEYS["sliding_window"]),
        "rope_local_base_freq": keys.number(CONFIG_KEYS["rope_local_base_freq"], default=10_000.0),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", minimum=0),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "final_logit_softcapping": keys.number(
            CONFIG_KEYS["final_logit_softcapping"], default=30.0
        ),
        "altup_active_idx": keys.integer("altup.active_idx", default=0, minimum=0),
        "altup_num_inputs": keys.integer("altup.num_inputs", default=4),
        "activation_sparsity_pattern": _sparsities(keys, layers),
        "laurel_rank": content.shape(_LAUREL)[0],
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": content.shape(_LAYER_EMBED)[0],
    }


def _sparsities(keys: Keys, num_layers: int) -> list[float]:
    """The file has the standard deviations beyond which activations count; −∞ of dense layers."""
    name = "activation_sparsity_scale"
    scales = keys.get(name)
    if (
        not isinstance(scales, np.ndarray)
        or scales.shape != (num_layers,)
        or scales.dtype.kind != "f"
        or np.isnan(scales).any()
    ):
        raise CorruptFileError(f"The GGUF file must give {name} as {num_layers} numbers.")
    return [NormalDist().cdf(scale) for scale in scales.tolist()]
