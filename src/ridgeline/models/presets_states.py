"""Shapes of published models that keep states of sequences, as in `presets`."""

from collections.abc import Mapping

STATE_PRESETS: Mapping[str, Mapping[str, object]] = {
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 2048,
        "block_ff_dim": 12_288,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
        "torch_dtype": "bfloat16",
    },
}
