"""Shapes of published models, as the config.json that each was published with."""

from collections.abc import Mapping

from ridgeline.models.presets_dense import DENSE_PRESETS
from ridgeline.models.presets_moe import MOE_PRESETS
from ridgeline.models.presets_states import STATE_PRESETS

_LLAMA_2: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def _llama_3(*, rope_factor: float, tied: bool) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


_QWEN_2_5: dict[str, object] = {
    "model_type": "qwen2",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}

_QWEN_3: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PRESETS: Mapping[str, Mapping[str, object]] = {
    **DENSE_PRESETS,
    **STATE_PRESETS,
    "llama-2-7b": _LLAMA_2 | _shape(4096, 11_008, 32, 32, 32),
    "llama-2-13b": _LLAMA_2 | _shape(5120, 13_824, 40, 40, 40),
    "llama-3.2-1b": _llama_3(rope_factor=32.0, tied=True)
    | _shape(2048, 8192, 16, 32, 8)
    | {"head_dim": 64},
    "llama-3.2-3b": _llama_3(rope_factor=32.0, tied=True)
    | _shape(3072, 8192, 28, 24, 8)
    | {"head_dim": 128},
    "llama-3.1-8b": _llama_3(rope_factor=8.0, tied=False) | _shape(4096, 14_336, 32, 32, 8),
    "llama-3.1-70b": _llama_3(rope_factor=8.0, tied=False) | _shape(8192, 28_672, 80, 64, 8),
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32_000,
        **_shape(4096, 14_336, 32, 32, 8),
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5-0.5b": _QWEN_2_5
    | _shape(896, 4864, 24, 14, 2)
    | {"vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2.5-1.5b": _QWEN_2_5
    | _shape(1536, 8960, 28, 12, 2)
    | {"vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2.5-7b": _QWEN_2_5
    | _shape(3584, 18_944, 28, 28, 4)
    | {"vocab_size": 152_064, "tie_word_embeddings": False},
    "qwen3-0.6b": _QWEN_3 | _shape(1024, 3072, 28, 16, 8) | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN_3 | _shape(4096, 12_288, 36, 32, 8) | {"tie_word_embeddings": False},
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        **_shape(2304, 9216, 26, 8, 4),
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "float32",
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        **_shape(1152, 6912, 26, 4, 1),
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "bfloat16",
    },
    **MOE_PRESETS,
}
