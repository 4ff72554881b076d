"""Broken and unsupported configs, and the error that each gives."""

import math

import pytest

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models import PRESETS, describe

CORRUPT, UNSUPPORTED = CorruptFileError, UnsupportedModelError
GEMMA_3 = "gemma-3-1b"
QWEN = "qwen2.5-0.5b"
LLAMA = "llama-3.2-1b"
ABSENT = "<absent>"

BAD = [
    (LLAMA, {"hidden_size": ABSENT}, CORRUPT, "hidden_size"),
    (LLAMA, {"vocab_size": None}, CORRUPT, "vocab_size"),
    (LLAMA, {"num_hidden_layers": 10**12}, CORRUPT, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": 0}, CORRUPT, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": -1}, CORRUPT, "num_hidden_layers"),
    (LLAMA, {"num_hidden_layers": "16"}, CORRUPT, "num_hidden_layers"),
    (LLAMA, {"hidden_size": 10**12}, CORRUPT, "hidden_size"),
    (LLAMA, {"hidden_size": 2048.0}, CORRUPT, "hidden_size"),
    (LLAMA, {"hidden_size": True}, CORRUPT, "hidden_size"),
    (LLAMA, {"vocab_size": 2**40}, CORRUPT, "vocab_size"),
    (LLAMA, {"intermediate_size": [8192]}, CORRUPT, "intermediate_size"),
    (LLAMA, {"max_position_embeddings": 0}, CORRUPT, "max_position_embeddings"),
    (LLAMA, {"num_attention_heads": 2**20}, CORRUPT, "num_attention_heads"),
    (LLAMA, {"num_key_value_heads": 7}, CORRUPT, "num_key_value_heads"),
    (LLAMA, {"num_key_value_heads": 64}, CORRUPT, "num_key_value_heads"),
    (LLAMA, {"head_dim": ABSENT, "hidden_size": 2049}, CORRUPT, "num_attention_heads"),
    (LLAMA, {"head_dim": 63}, UNSUPPORTED, "head_dim"),
    (LLAMA, {"head_dim": 2**20}, CORRUPT, "head_dim"),
    (LLAMA, {"rms_norm_eps": math.nan}, CORRUPT, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": math.inf}, CORRUPT, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": 0}, CORRUPT, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": -1e-6}, CORRUPT, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": "1e-6"}, CORRUPT, "rms_norm_eps"),
    (LLAMA, {"rope_theta": 0}, CORRUPT, "rope_theta"),
    (LLAMA, {"rope_theta": 1e300}, CORRUPT, "rope_theta"),
    (LLAMA, {"tie_word_embeddings": "yes"}, CORRUPT, "tie_word_embeddings"),
    (LLAMA, {"attention_bias": 1}, CORRUPT, "attention_bias"),
    (LLAMA, {"hidden_act": "mish"}, UNSUPPORTED, "hidden_act"),
    (LLAMA, {"hidden_act": ["silu"]}, CORRUPT, "hidden_act"),
    (LLAMA, {"pretraining_tp": 2}, UNSUPPORTED, "pretraining_tp"),
    (LLAMA, {"per_layer_config": {"0": {}}}, UNSUPPORTED, "per_layer_config"),
    (LLAMA, {"partial_rotary_factor": 0.5}, UNSUPPORTED, "partial_rotary_factor"),
    (LLAMA, {"attn_output_gate": True}, UNSUPPORTED, "attn_output_gate"),
    (LLAMA, {"is_encoder_decoder": True}, UNSUPPORTED, "is_encoder_decoder"),
    (LLAMA, {"is_causal": False}, UNSUPPORTED, "is_causal"),
    (LLAMA, {"torch_dtype": "int8"}, UNSUPPORTED, "torch_dtype"),
    (LLAMA, {"torch_dtype": 16}, CORRUPT, "torch_dtype"),
    (LLAMA, {"rope_scaling": "linear"}, CORRUPT, "rope_scaling"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, CORRUPT, "rope_scaling.factor"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, CORRUPT, "rope_scaling.factor"),
    (LLAMA, {"rope_scaling": {"type": "magic", "factor": 2}}, UNSUPPORTED, "magic"),
    (LLAMA, {"rope_scaling": {"rope_type": 3}}, CORRUPT, "rope_type"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4}},
        CORRUPT,
        "low_freq_factor",
    ),
    (
        LLAMA,
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
            }
        },
        UNSUPPORTED,
        "high_freq_factor",
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": math.nan}},
        CORRUPT,
        "beta_fast",
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}},
        CORRUPT,
        "truncate",
    ),
    (LLAMA, {"rope_parameters": {"rope_theta": 1e4}}, UNSUPPORTED, "rope_parameters"),
    (LLAMA, {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, UNSUPPORTED, "dyn"),
    ("mistral-7b", {"sliding_window": 0}, CORRUPT, "sliding_window"),
    ("mistral-7b", {"layer_types": ["full_attention"] * 32}, UNSUPPORTED, "layer_types"),
    (QWEN, {"layer_types": ["full_attention"]}, CORRUPT, "layer_types"),
    (QWEN, {"layer_types": "full_attention"}, CORRUPT, "layer_types"),
    (QWEN, {"layer_types": ["linear_attention"] * 24}, UNSUPPORTED, "linear_attention"),
    (QWEN, {"layer_types": ["sliding_attention"] * 24}, UNSUPPORTED, "sliding_window"),
    (QWEN, {"use_sliding_window": "no"}, CORRUPT, "use_sliding_window"),
    (QWEN, {"max_window_layers": -1}, CORRUPT, "max_window_layers"),
    ("gemma-2-2b", {"sliding_window": None}, UNSUPPORTED, "sliding_window"),
    ("gemma-2-2b", {"attn_logit_softcapping": 0}, CORRUPT, "attn_logit_softcapping"),
    ("gemma-2-2b", {"final_logit_softcapping": math.nan}, CORRUPT, "final_logit_softcapping"),
    ("gemma-2-2b", {"query_pre_attn_scalar": 0}, CORRUPT, "query_pre_attn_scalar"),
    ("gemma-2-2b", {"use_bidirectional_attention": True}, UNSUPPORTED, "bidirectional"),
    (GEMMA_3, {"attn_logit_softcapping": 50.0}, UNSUPPORTED, "attn_logit_softcapping"),
    (GEMMA_3, {"sliding_window_pattern": 0}, CORRUPT, "sliding_window_pattern"),
    (GEMMA_3, {"rope_parameters": {"rope_theta": 1e4}}, UNSUPPORTED, "rope_parameters"),
    (GEMMA_3, {"rope_parameters": {"full_attention": 3}}, CORRUPT, "full_attention"),
    (GEMMA_3, {"model_type": "gemma3", "text_config": None}, CORRUPT, "text_config"),
    (GEMMA_3, {"model_type": "gemma3", "text_config": []}, CORRUPT, "text_config"),
    (
        GEMMA_3,
        {"model_type": "gemma3", "text_config": {"is_causal": False}},
        UNSUPPORTED,
        "text_config.is_causal",
    ),
]


def _name(value):
    return str(value)[:60] if isinstance(value, dict) else None


@pytest.mark.parametrize(("preset", "changes", "error", "names"), BAD, ids=_name)
def test_bad_config(preset, changes, error, names):
    config = {k: v for k, v in (dict(PRESETS[preset]) | changes).items() if v is not ABSENT}
    with pytest.raises(error) as caught:
        describe(config)
    message = str(caught.value)
    assert names in message
    assert "\n" not in message
    assert len(message) < 300
