"""Latent attention as DeepSeek's configs describe it, and the tensor names of their models."""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import MLASpec, NormKind, NormSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import TensorSource
from ridgeline.models.rope import yarn_mscale
from ridgeline.models.rope_config import read_rope, rope_section
from ridgeline.models.tensor_names import layer_tensors

_MAX_WIDTH = 2**20
# DeepSeek's code leaves it at the default, whatever rms_norm_eps says.
_LATENT_NORM = NormSpec(kind=NormKind.RMS, eps=1e-6)


def read_mla(
    config: ConfigReader,
    *,
    max_position: int,
    query_rank: int | None,
    interleaved: bool,
    of_whole_head: bool = False,
) -> MLASpec:
    """The attention of all layers; ``query_rank`` is the family's default.

    ``of_whole_head``: ``partial_rotary_factor`` says the rotated part of a head once more.

    Raises:
        UnsupportedModelError: ``num_key_value_heads`` is not the number of heads, or another part
            of each head is to be rotated than ``qk_rope_head_dim``.
    """
    num_heads = config.integer("num_attention_heads", maximum=2**14)
    config.refuse("num_key_value_heads", unless=(num_heads,))
    nope_dim = config.integer("qk_nope_head_dim", maximum=_MAX_WIDTH, default=128)
    rope_dim = config.integer("qk_rope_head_dim", minimum=2, maximum=_MAX_WIDTH, default=64)
    if rope_dim % 2:
        raise UnsupportedModelError(f"config.json gives an odd qk_rope_head_dim, {rope_dim}.")
    for name in ("head_dim", "qk_head_dim"):  # transformers writes what follows from the others
        config.ignore(name)
    part = rope_dim / (nope_dim + rope_dim)
    if of_whole_head:
        rope_section(config).refuse("partial_rotary_factor", unless=(part,))
    rope = read_rope(
        config,
        head_dim=nope_dim + rope_dim if of_whole_head else rope_dim,
        max_position=max_position,
        partial=part if of_whole_head else None,
    )
    bias = config.boolean("attention_bias", default=False)
    return MLASpec(
        num_heads=num_heads,
        query_rank=config.optional_integer("q_lora_rank", maximum=_MAX_WIDTH, default=query_rank),
        latent_dim=config.integer("kv_lora_rank", maximum=_MAX_WIDTH, default=512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim", maximum=_MAX_WIDTH, default=128),
        scale=(nope_dim + rope_dim) ** -0.5 * _mscale(config, rope) ** 2,
        rope=replace(rope, interleaved=interleaved),
        latent_norm=_LATENT_NORM,
        latent_bias=bias,
        out_bias=bias,
    )


def _mscale(config: ConfigReader, rope: RopeSpec) -> float:
    """What scaled rotary positions multiply q and k by, rotated or not (``mscale_all_dim``).

    Cos and sin carry the rest of YaRN's factor (`rope.yarn_attention_factor`).
    """
    section = rope_section(config)
    mscale = section.number("mscale_all_dim", minimum=0.0, maximum=1e3, default=0.0)
    if rope.scaling is None or not mscale:
        return 1.0
    return yarn_mscale(section.number("factor", minimum=1e-3, maximum=1e6), mscale)


def _biases(modules: dict[str, str]) -> dict[str, TensorSource]:
    return {
        f"layers.{{i}}.{name}_bias": TensorSource(name=f"model.layers.{{i}}.{module}.bias")
        for name, module in modules.items()
    }


_DOWN = {"q_a": "self_attn.q_a_proj", "kv_a": "self_attn.kv_a_proj_with_mqa"}
MLA_TENSORS = {
    **layer_tensors(
        {
            **_DOWN,
            "q_a_norm": "self_attn.q_a_layernorm",
            "kv_a_norm": "self_attn.kv_a_layernorm",
            "kv_b": "self_attn.kv_b_proj",
        }
    ),
    **_biases(_DOWN),
    "layers.{i}.q": TensorSource(
        name="model.layers.{i}.self_attn.q_b_proj.weight",
        other_names=("model.layers.{i}.self_attn.q_proj.weight",),  # without a latent for q
    ),
}
