"""Falcon-H1 (TII, arXiv 2507.22448): attention and Mamba-2 side by side in each layer, with
multipliers after μP (arXiv 2203.03466)."""

from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import ModelSpec
from ridgeline.models.bamba import FAMILY as BAMBA
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_rms_norm, read_sizes
from ridgeline.models.mamba_config import BAMBA_KEYS, read_mamba2
from ridgeline.models.rope_config import read_rope

_KEYS = replace(BAMBA_KEYS, width="mamba_d_ssm")
_MULTIPLIERS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """Multipliers are moved to where an op has a factor already, which changes no product: those of
    what an activation reads to the norm before it, and out of what else reads that norm."""
    for name in ("layer_types", "layers_block_type", "num_logits_to_keep"):
        config.ignore(name)
    config.refuse("mamba_use_mlp", unless=(True,))
    embedding, head, key, attention_in, attention_out, scan_in, scan_out = (
        config.number(name, minimum=1e-9, maximum=1e9, default=1.0) for name in _MULTIPLIERS
    )
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    scan_gate, *inputs, step = _multipliers(config, "ssm_multipliers", 5)
    if step != scan_gate:
        raise UnsupportedModelError(
            "config.json has ssm_multipliers whose first (of the gate) and last (of the step) "
            "differ, and Ridgeline scales both by the norm before them."
        )
    shared = scan_in * scan_gate
    attention_in /= shared
    _refuse_biases(config, "attention_bias", attention_in)
    _refuse_biases(config, "mamba_proj_bias", scan_gate, *inputs)
    _refuse_biases(config, "mlp_bias", gate)
    sizes = read_sizes(config, max_position=8192)
    heads = read_heads(config, sizes.hidden_size, num_kv_heads=8)
    norm = read_rms_norm(config, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    attention = replace(
        heads.attention(rope),
        scale=heads.head_dim**-0.5 * key * attention_in**2,
        qkv_bias=bias,
        out_bias=bias,
    )
    has_norm = config.boolean("mamba_rms_norm", default=False)
    config.refuse("mamba_norm_before_gate", unless=(False,) if has_norm else (False, True))
    scan = read_mamba2(
        config, _KEYS, hidden_size=sizes.hidden_size, norm=norm if has_norm else None
    )
    config.refuse("projectors_bias", unless=(scan.bias,))
    x, write, read = (each / scan_gate for each in inputs)
    spec = pre_norm_decoder(
        config,
        model_type="falcon_h1",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlp_bias=config.boolean("mlp_bias", default=False),
        norm=norm,
    )
    layer = replace(
        spec.layers[0],
        scan=replace(scan, input_scales=(x, write, read)),
        attention_norm_scale=shared,
        attention_scale=attention_in * attention_out,
        scan_scale=scan_out,
        mlp_norm_scale=gate,
        mlp_scale=down / gate,
    )
    return replace(
        spec,
        layers=(layer,) * sizes.num_layers,
        embedding_scale=embedding,
        logit_scale=head,
    )


def _multipliers(config: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    found = config.numbers(name, minimum=1e-9, maximum=1e9) or (1.0,) * count
    if len(found) != count:
        raise CorruptFileError(f"config.json gives {len(found)} {name}, not {count}.")
    return found


def _refuse_biases(config: ConfigReader, name: str, *multipliers: float) -> None:
    """A bias is not multiplied with what it is added to, where the norm before is."""
    if config.boolean(name, default=False) and set(multipliers) != {1.0}:
        raise UnsupportedModelError(
            f"config.json sets {name} beside multipliers of what such biases are added to, and "
            "Ridgeline scales the input of the product instead."
        )


FAMILY = Family(
    model_type="falcon_h1",
    build=build,
    tensors=BAMBA.tensors,
    fused=BAMBA.fused,
    ignored=BAMBA.ignored,
    computes=frozenset({"embedding_multiplier"}),
)
