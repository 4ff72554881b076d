"""What families that are not supported need and Ridgeline lacks, in words."""

from ridgeline.models.config import ConfigReader

# By the start of a ``model_type``; the longest that fits counts.
_LACKING = {
    "deepseek_v32": "an indexer that picks the keys that attention reads",
    "falcon_h1": "the Mamba-2 state-space scan",
    "falcon_mamba": "the Mamba state-space scan",
    "gemma3n": "per-layer embeddings",
    "gemma4": "per-layer embeddings",
    "glm_moe_dsa": "an indexer that picks the keys that attention reads",
    "granitemoehybrid": "the Mamba-2 state-space scan",
    "jamba": "the Mamba state-space scan",
    "kimi_linear": "the gated delta rule of linear attention",
    "lfm2": "short convolutions over the sequence",
    "mamba": "the Mamba state-space scan",
    "nemotron_h": "the Mamba-2 state-space scan",
    "qwen3_5": "the gated delta rule of linear attention",
    "qwen3_next": "the gated delta rule of linear attention",
    "recurrent_gemma": "a gated linear recurrence",
    "rwkv": "the RWKV recurrence",
    "t5": "an encoder",
    "whisper": "an encoder of audio",
}
# Keys that tell, of a ``model_type`` that is not listed.
_KEYS = {
    "ssm_cfg": "a state-space scan",
    "mamba_d_state": "a state-space scan",
    "linear_num_value_heads": "linear attention",
    "conv_L_cache": "short convolutions over the sequence",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "KV shared by layers",
    "index_topk": "an indexer that picks the keys that attention reads",
    "audio_config": "an encoder of audio",
    "vision_config": "a vision tower",
}


def lacking_for(model_type: str, config: ConfigReader) -> str | None:
    """What Ridgeline lacks for a family that it does not know, where that can be told."""
    starts = [start for start in _LACKING if model_type.startswith(start)]
    if starts:
        return _LACKING[max(starts, key=len)]
    return next((f"{what} ({key})" for key, what in _KEYS.items() if key in config), None)
