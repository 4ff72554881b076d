"""Gemma 3, its text model (arXiv 2503.19786): five windowed layers to each global one.

Also serves ``gemma3``, the model with vision, by its ``text_config`` and without the vision tower.
"""

from dataclasses import replace

from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    layer_windows,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.gemma2 import MIN_CAP, gemma_decoder
from ridgeline.models.known_keys import refuse_unsupported
from ridgeline.models.rope_config import (
    nested_by_kind,
    plain_rope,
    read_nested_ropes,
    read_rope,
)
from ridgeline.models.tensor_names import GEMMA_TENSORS, LLAMA_IGNORED
from ridgeline.models.vision import VISION_TENSORS, beside_vision, leave_out_vision

_GLOBAL_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0


def build(config: ConfigReader) -> ModelSpec:
    """Norms on the heads of q and k; windowed layers have a rope of their own.

    With ``use_bidirectional_attention`` it is an encoder (EmbeddingGemma), half of whose windows
    lies to each side.
    """
    encodes = config.boolean("use_bidirectional_attention", default=False)
    # transformers reads this key and then leaves it out of the computation.
    config.refuse("attn_logit_softcapping")
    sizes = read_sizes(config, max_position=131_072, vocab_size=262_208)
    # The sizes of Gemma 3 4B, which its config leaves out.
    heads = read_heads(config, sizes.hidden_size, num_heads=8, num_kv_heads=4, head_dim=256)
    config.ignore("_sliding_window_pattern")  # written beside layer_types, and never read
    pattern = config.integer("sliding_window_pattern", default=6)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default=default)
    window = config.optional_integer("sliding_window", default=4096)
    windows = layer_windows(kinds, window // 2 + 1 if encodes and window else window)
    ropes = read_gemma_ropes(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    bias = config.boolean("attention_bias", default=False)
    scalar = config.number("query_pre_attn_scalar", minimum=1e-3, default=256)
    qk_norm = read_rms_norm(config, unit_offset=True)
    attention = (
        replace(
            heads.attention(ropes[kind]),
            scale=scalar**-0.5,
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm,
            bidirectional=encodes,
        )
        for kind, window in zip(kinds, windows, strict=True)
    )
    spec = gemma_decoder(
        config,
        model_type="gemma3_text",
        sizes=sizes,
        attention=attention,
        logit_softcap=config.optional_number("final_logit_softcapping", minimum=MIN_CAP),
        max_position=sizes.max_position,  # Gemma 3 counts its scaling in
    )
    return replace(spec, has_head=False) if encodes else spec


def build_with_vision(config: ConfigReader) -> ModelSpec:
    """The text model of a config that has a vision tower beside it."""
    leave_out_vision(config)
    text = config.section("text_config")
    for part in (config, text):
        part.refuse("tie_word_embeddings", unless=(True,))
    text.refuse("final_logit_softcapping")  # read and left out by transformers
    refuse_unsupported(text)
    return build(text)


def read_gemma_ropes(
    config: ConfigReader, *, head_dim: int, max_position: int
) -> dict[str, RopeSpec]:
    """Ropes by kind of layer; in the old spelling ``rope_scaling`` is for global layers only."""
    local = config.number("rope_local_base_freq", minimum=2.0, default=_LOCAL_THETA)
    if nested_by_kind(config):
        outer = config.number("rope_theta", minimum=2.0, default=_GLOBAL_THETA)
        thetas = {FULL: outer, SLIDING: local}
        return read_nested_ropes(
            config, head_dim=head_dim, max_position=max_position, thetas=thetas
        )
    config.refuse("rope_parameters", unless=())
    return {
        FULL: read_rope(config, head_dim=head_dim, max_position=max_position, theta=_GLOBAL_THETA),
        SLIDING: plain_rope(head_dim=head_dim, theta=local),
    }


FAMILY = Family(
    model_type="gemma3_text",
    build=build,
    tensors=GEMMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"use_bidirectional_attention"}),
)
FAMILY_WITH_VISION = Family(
    model_type="gemma3",
    build=build_with_vision,
    tensors=beside_vision(GEMMA_TENSORS),
    ignored=(*LLAMA_IGNORED, VISION_TENSORS),
)
