"""What families that are not supported need and Ridgeline lacks, in words."""

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.models.config import ConfigReader

# By the start of a ``model_type``; the longest that fits counts.
_LACKING = {
    "bailing_hybrid": "linear attention",
    "bloom": "ALiBi's biases on attention",
    "blt": "patches of bytes",
    "cohere2_moe": "an average of routed and shared experts",
    "deepseek_v4": "an indexer that picks the keys that attention reads",
    "diffllama": "differential attention",
    "doge": "dynamic masks of attention",
    "falcon_mamba": "the Mamba state-space scan",
    "glm4v": "a vision tower",
    "jamba": "the Mamba state-space scan",
    "jetmoe": "mixtures of attention heads",
    "kimi_linear": "a decay of linear attention for each channel",
    "longcat_flash": "experts that compute nothing",
    "mamba": "the Mamba state-space scan",
    "mimo_v2_flash": "heads of V that are narrower than those of K",
    "minimax": "linear attention",
    "mpt": "ALiBi's biases on attention",
    "muse_glimmer_assistant": "a pass that drafts a block (DFlash)",
    "olmo_hybrid": "the gated delta rule with factors up to 2",
    "opt": "learned positions with an offset",
    "phimoe": "the SparseMixer router",
    "recurrent_gemma": "a gated linear recurrence",
    "rwkv": "the RWKV recurrence",
    "t5": "an encoder",
    "whisper": "an encoder of audio",
    "xlstm": "the xLSTM recurrence",
    "zamba": "the Mamba state-space scan",
    "zamba2": "an attention block that several layers share",
}
# Keys that tell, of a ``model_type`` that is not listed.
_KEYS = {
    "ssm_cfg": "a state-space scan",
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


def refuse_block_drafter(config: ConfigReader) -> None:
    """
    Raises:
        UnsupportedModelError: it is of a drafter that drafts a block in one pass, as DFlash (arXiv
            2602.06036) and what was made of it.
    """
    if (
        "dflash_config" in config
        or config.text("speculators_model_type", default="") in ("dflash", "dspark")
        or any("DFlash" in name for name in config.texts("architectures") or ())
    ):
        raise UnsupportedModelError(
            "This is a DFlash drafter, which drafts a block of tokens in one pass, and Ridgeline's "
            "drafters draft one after the other; speculation eagle3, mtp and medusa take others "
            "that read the model's hidden states."
        )
