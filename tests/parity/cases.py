"""Tiny models of every family, one line of the test's output each."""

from dataclasses import dataclass

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.03,  # large, so that the tests feel it
}
THETA = 5_000.0
YARN = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config: `SIZES` with some changes, and the context that it is read for."""

    family: str
    name: str
    changes: dict[str, object]
    prompt_tokens: int = 72
    seed: int = 0
    max_model_len: int | None = None

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"

    @property
    def config(self) -> dict[str, object]:
        return SIZES | self.changes


def _llama(name: str, **changes: object) -> Case:
    return Case(family="llama", name=name, changes=changes)


def _scaled(name: str, **rope: object) -> Case:
    changes: dict[str, object] = {"rope_parameters": {"rope_theta": THETA} | rope}
    if rope["rope_type"] == "dynamic":
        changes["max_position_embeddings"] = 48
    return Case(family="llama", name=name, changes=changes)


_TURNS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA: dict[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 11,
    "layer_types": _TURNS,
    "query_pre_attn_scalar": 11,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA_3 = _GEMMA | {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
}
_GLOBAL_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}

CASES = [
    _llama("plain", num_key_value_heads=4),
    _llama("grouped"),
    _llama("multi-query", num_key_value_heads=1),
    _llama("biases", attention_bias=True, mlp_bias=True),
    _llama("wide-heads", head_dim=24),
    _llama("tied", tie_word_embeddings=True),
    _llama("gelu", hidden_act="gelu"),
    _llama("relu", hidden_act="relu"),
    _scaled("linear", rope_type="linear", factor=2.5),
    _scaled("dynamic", rope_type="dynamic", factor=3.0),
    _scaled("llama3", **LLAMA_3),
    _scaled("yarn", **YARN, truncate=False),
    _scaled("yarn-truncated", **YARN),
    _scaled("yarn-factor", **YARN, truncate=False, attention_factor=1.3),
    _scaled("yarn-mscale", **YARN, truncate=False, mscale=0.7, mscale_all_dim=0.2),
    Case(family="mistral", name="window", changes={"sliding_window": 13}),
    Case(family="mistral", name="no-window", changes={"sliding_window": None, "head_dim": 24}),
    Case(family="qwen2", name="plain", changes={}),
    Case(family="mimo", name="plain", changes={}),
    Case(
        family="qwen2",
        name="late-windows",
        changes={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    Case(
        family="qwen2",
        name="layer-types",
        changes={
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    Case(family="qwen2", name="yarn", changes={"rope_parameters": YARN | {"truncate": False}}),
    Case(family="qwen3", name="plain", changes={"head_dim": 24}),
    Case(
        family="qwen3",
        name="biases-windows",
        changes={
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        family="gemma2",
        name="softcaps",
        changes=_GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    Case(
        family="gemma2",
        name="no-softcaps",
        changes=_GEMMA
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "num_key_value_heads": 4,
            "head_dim": 24,
        },
    ),
    Case(family="gemma3_text", name="local-global", changes=_GEMMA_3),
    Case(
        family="gemma3_text",
        name="global-linear",
        changes=_GEMMA_3 | {"rope_parameters": _GLOBAL_LINEAR, "final_logit_softcapping": 5.0},
    ),
    Case(
        family="gemma3",
        name="vision-left-out",
        changes={"text_config": SIZES | _GEMMA_3 | {"rope_parameters": _GLOBAL_LINEAR}},
    ),
]

# Together these set every field of a spec that a family can set.
TELLING = (
    "llama-biases",
    "llama-tied",
    "llama-linear",
    "llama-dynamic",
    "llama-llama3",
    "llama-yarn",
    "mistral-window",
    "qwen2-late-windows",
    "qwen3-biases-windows",
    "gemma2-softcaps",
    "gemma2-no-softcaps",
    "gemma3_text-global-linear",
)
