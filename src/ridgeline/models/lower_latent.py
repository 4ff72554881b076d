"""Lowering of multi-head latent attention.

Canonical weight names, below ``layers.{i}.``: ``q_a`` and ``q_a_norm`` (to q's latent, if it has
one), ``q``, ``kv_a`` and ``kv_a_norm`` (to the latent that is cached), ``kv_b`` (from it to K and
V), ``o``, and ``q_a_bias``, ``kv_a_bias`` and ``o_bias``.
"""

from collections.abc import Callable

from ridgeline.core.ops import (
    GrowQueries,
    KVWrite,
    LatentAttend,
    LatentProject,
    Op,
    OutProject,
    Rope,
    Weight,
)
from ridgeline.core.spec import MLASpec


def latent_attention_ops(
    spec: MLASpec,
    src: str,
    *,
    layer: int,
    group: int,
    hidden_size: int,
    weight: Callable[..., Weight],
) -> list[Op]:
    """The ops from ``src`` to ``h``; ``weight(name, *shape)`` names a weight of the layer."""
    assert spec.latent_norm.gain
    assert not spec.latent_norm.bias
    rank, q_width = spec.query_rank, spec.num_heads * (spec.nope_dim + spec.rope_dim)
    latent_width = spec.latent_dim + spec.rope_dim
    has_rank_bias = spec.latent_bias and rank is not None
    project = LatentProject(
        query_latent=None if rank is None else weight("q_a", rank, hidden_size),
        query_latent_bias=weight("q_a_bias", rank) if has_rank_bias else None,
        query_norm=None if rank is None else weight("q_a_norm", rank),
        query=weight("q", q_width, hidden_size if rank is None else rank),
        latent=weight("kv_a", latent_width, hidden_size),
        latent_bias=weight("kv_a_bias", latent_width) if spec.latent_bias else None,
        latent_norm=weight("kv_a_norm", spec.latent_dim),
        norm=spec.latent_norm,
        num_heads=spec.num_heads,
        src=src,
    )
    attend = LatentAttend(
        layer=layer,
        group=group,
        expand=weight("kv_b", spec.num_heads * (spec.nope_dim + spec.v_dim), spec.latent_dim),
        num_heads=spec.num_heads,
        latent_dim=spec.latent_dim,
        nope_dim=spec.nope_dim,
        rope_dim=spec.rope_dim,
        v_dim=spec.v_dim,
        scale=spec.scale,
    )
    out = OutProject(
        weight=weight("o", hidden_size, spec.num_heads * spec.v_dim),
        bias=weight("o_bias", hidden_size) if spec.out_bias else None,
    )
    rope = Rope(
        spec=spec.rope,
        num_heads=spec.num_heads,
        num_kv_heads=1,
        head_dim=spec.nope_dim + spec.rope_dim,
        key_dim=latent_width,
        query_start=spec.nope_dim,
        key_start=spec.latent_dim,
    )
    write = KVWrite(
        layer=layer,
        group=group,
        num_kv_heads=1,
        k_width=latent_width,
        v_width=0,
        has_values=False,
    )
    ops: list[Op] = [project, rope, write]
    if spec.query_growth is not None:
        heads, width = spec.num_heads, rope.head_dim
        ops.append(GrowQueries(growth=spec.query_growth, num_heads=heads, head_dim=width))
    return [*ops, attend, out]
