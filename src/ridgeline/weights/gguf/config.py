"""From a GGUF file's metadata to a model: a Hugging Face config is made up, and understood.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults that files leave out are
those of llama.cpp (``src/models/*.cpp``).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models import ModelDefinition, describe
from ridgeline.models.config import show
from ridgeline.models.fields import FULL
from ridgeline.weights.gguf.decoder_config import (
    GPT2_SIZES,
    Config,
    GGUFContent,
    decoder,
    integers,
    layer_types,
    with_scaling,
)
from ridgeline.weights.gguf.dense_configs import DENSE_BUILDERS
from ridgeline.weights.gguf.expert_configs import EXPERT_BUILDERS
from ridgeline.weights.gguf.gemma3n_config import gemma3n
from ridgeline.weights.gguf.gemma4_config import gemma4
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys
from ridgeline.weights.gguf.names import ARCHITECTURES
from ridgeline.weights.gguf.rope import ORIGINAL_LENGTH_KEY
from ridgeline.weights.gguf.state_configs import STATE_BUILDERS

_EMBED = "token_embd.weight"
_DTYPE_OF_FILE_TYPE: Mapping[int, str] = {0: "float32", 1: "float16"}  # ``enum llama_ftype``
_GUESSED_FILE_TYPE = 1024  # a flag


def describe_gguf(
    checkpoint: GGUFContent, *, strict: bool = False, context: int | None = None
) -> ModelDefinition:
    """The model in a GGUF file; its sources are names of GGUF tensors. See `describe`.

    Raises:
        CorruptFileError: a key is missing, of the wrong type, or absurd.
        UnsupportedModelError: the architecture, or something that the file asks for, is one that
            Ridgeline lacks.
    """
    name = checkpoint.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CorruptFileError("The GGUF file does not name its general.architecture.")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"The GGUF file has the architecture {show(name)}; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    definition = describe(config_of(checkpoint, name), strict=strict, context=context)
    architecture, theirs = ARCHITECTURES[name], definition.family.tensors
    tensors = {
        # Adapters have the names of Hugging Face's layout.
        weight: replace(
            source,
            other_names=(*source.other_names, theirs[weight].name, *theirs[weight].other_names),
        )
        if weight in theirs
        else source
        for weight, source in architecture.tensors.items()
    }
    extra = Keys(checkpoint.metadata, name).integer("nextn_predict_layers", default=0, minimum=0)
    first = len(definition.spec.layers)  # behind these lie layers that predict one more token
    ignored = tuple(rf"blk\.{layer}\..*" for layer in range(first, first + min(extra, 8)))
    family = replace(
        definition.family,
        tensors=tensors,
        fused=architecture.fused,
        fused_heads=architecture.fused_heads,
        ignored=(*architecture.ignored, *ignored),
    )
    return replace(definition, family=family)


def config_of(checkpoint: GGUFContent, architecture: str) -> Config:
    """The config.json that the model would have."""
    keys = Keys(checkpoint.metadata, architecture)
    if keys.get("attention.causal") is False:
        raise UnsupportedModelError(
            f"The GGUF file sets {architecture}.attention.causal to false, which is not supported."
        )
    if _EMBED not in checkpoint.names() or len(checkpoint.shape(_EMBED)) != 2:
        raise CorruptFileError(f"The GGUF file has no matrix {_EMBED}.")
    rows = checkpoint.shape(_EMBED)[0]
    shared: Config = {
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in checkpoint.names(),
        "torch_dtype": _dtype(checkpoint),
    }
    return shared | _BUILDERS[architecture](keys, checkpoint)


def _dtype(checkpoint: GGUFContent) -> str:
    """What weights are expanded to: the format that most of them have, bfloat16 for quantized ones.

    bfloat16 and not float16, whose range some models' activations leave.
    """
    file_type = checkpoint.metadata.get("general.file_type")
    if isinstance(file_type, int):
        return _DTYPE_OF_FILE_TYPE.get(file_type & ~_GUESSED_FILE_TYPE, "bfloat16")
    stored = checkpoint.format_name(_EMBED)
    return {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")


def _llama(keys: Keys, checkpoint: GGUFContent) -> Config:
    """Llama, Mistral and Mixtral: converters give all of them this architecture."""
    config = with_scaling(decoder(keys), keys, checkpoint)
    names = checkpoint.names()
    window = keys.integer(CONFIG_KEYS["sliding_window"], default=0, minimum=0)
    experts = keys.integer(CONFIG_KEYS["num_local_experts"], default=0, minimum=0)
    if experts:
        if "blk.0.ffn_gate.0.weight" in names:
            raise UnsupportedModelError(
                "The GGUF file stores each expert by itself, as files of 2023 do; take a newer one."
            )
        return config | {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": keys.integer(CONFIG_KEYS["num_experts_per_tok"]),
            "sliding_window": window or None,
        }
    if window:
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
    }


def _qwen2(keys: Keys, checkpoint: GGUFContent) -> Config:
    config = with_scaling(decoder(keys), keys, checkpoint)
    return config | {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(keys: Keys, checkpoint: GGUFContent) -> Config:
    return _qwen2(keys, checkpoint) | {"model_type": "qwen3"}


def _gemma(keys: Keys, config: Config, *, layers_of_27b: int) -> Config:
    """What Gemma 2 and 3 share; the 27B models scale attention by another width than their heads'.

    The file does not say so; llama.cpp tells them by their number of layers too.
    """
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_27b else config["head_dim"],
    }


def _gemma2(keys: Keys, checkpoint: GGUFContent) -> Config:
    config = with_scaling(decoder(keys), keys, checkpoint)
    return _gemma(keys, config, layers_of_27b=46) | {
        "model_type": "gemma2",
        "sliding_window": keys.integer(CONFIG_KEYS["sliding_window"], default=4096),
        "attn_logit_softcapping": keys.number(CONFIG_KEYS["attn_logit_softcapping"], default=50.0),
        "final_logit_softcapping": keys.number(
            CONFIG_KEYS["final_logit_softcapping"], default=30.0
        ),
    }


def _gemma3(keys: Keys, checkpoint: GGUFContent) -> Config:
    config = with_scaling(decoder(keys), keys, checkpoint)
    num_layers = keys.integer("block_count")
    window = keys.integer(CONFIG_KEYS["sliding_window"], default=0, minimum=0)
    cap = keys.number(CONFIG_KEYS["final_logit_softcapping"], default=0.0)
    return _gemma(keys, config, layers_of_27b=62) | {
        "model_type": "gemma3_text",
        "layer_types": layer_types(keys, num_layers, default=6) if window else [FULL] * num_layers,
        "sliding_window": window or None,
        "rope_local_base_freq": keys.number(CONFIG_KEYS["rope_local_base_freq"], default=10_000.0),
        "final_logit_softcapping": cap or None,
    }


def _phi3(keys: Keys, checkpoint: GGUFContent) -> Config:
    """Positions beyond the original context are divided by the tensors of long factors."""
    config = decoder(keys)
    window = keys.integer(CONFIG_KEYS["sliding_window"], default=0, minimum=0)
    config |= {
        "model_type": "phi3",
        "sliding_window": window or None,
        "original_max_position_embeddings": keys.integer(
            ORIGINAL_LENGTH_KEY, default=keys.integer("context_length")
        ),
    }
    long, short = (checkpoint.vector(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if (long is None) != (short is None):
        raise CorruptFileError("The GGUF file has one of the two tensors rope_factors only.")
    if long is not None and short is not None:
        scaling: Config = {
            "type": "longrope",
            "long_factor": [float(str(value)) for value in long],
            "short_factor": [float(str(value)) for value in short],
        }
        if keys.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
        config["rope_scaling"] = scaling
    return config


def _gpt2(keys: Keys, _: GGUFContent) -> Config:
    return integers(keys, GPT2_SIZES) | {
        "model_type": "gpt2",
        "layer_norm_epsilon": keys.number(CONFIG_KEYS["layer_norm_epsilon"]),
        "activation_function": "gelu_new",
    }


_BUILDERS: Mapping[str, Callable[[Keys, GGUFContent], Config]] = {
    **DENSE_BUILDERS,
    **EXPERT_BUILDERS,
    **STATE_BUILDERS,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
