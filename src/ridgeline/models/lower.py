"""From a spec to the ordered list of ops that executors run and the roofline prices.

Canonical weight names: ``embed``, ``positions`` (learned), ``types``, ``embedding_norm``,
``final_norm``, ``head``, and for layer i ``layers.{i}.`` with
``attention_norm``, ``q``, ``k``, ``v``, ``o``, ``q_norm``, ``k_norm``, ``attention_post_norm``,
``attention_residual_norm``, ``mlp_norm``, ``gate``, ``up``, ``down``, ``mlp_post_norm``,
``mlp_residual_norm``, and ``q_bias`` and so on for biases. Of experts beside a network
``mlp_own_norm``, ``router_norm``, ``experts_norm`` and ``experts_own_norm``. ``out_norm`` and
``inner_norm`` are of what ``o`` and ``down`` read, ``xielu.rise``, ``xielu.fall``, ``xielu.beta``
and ``xielu.eps`` the numbers of xIELU. Of per-layer embeddings ``layer_embed``,
``layer_projection``, its norm, and of layer i ``input_gate``, ``input_up`` and ``input_norm``. Of
residual streams ``streams.{k}.split`` and ``streams.{k}.join``, and of layer i ``stream_router``,
``stream_norm``, ``predict``, ``correct`` and ``correct_scale``; of LAuReL ``laurel_down``,
``laurel_up`` and ``laurel_norm``.
A tied head reads ``embed``. ``scale`` is the layer's, ``sinks`` and ``gate_heads`` are attention's;
`lower_latent`, `lower_moe` and `lower_states` name the weights of latent attention, experts, and
what keeps states.
"""

from dataclasses import replace

from ridgeline.core.cache_groups import kv_groups, kv_shape, state_group
from ridgeline.core.errors import SettingsError
from ridgeline.core.ops import (
    Embed,
    Head,
    JoinStreams,
    KeepFeatures,
    LayerEmbed,
    Norm,
    Op,
    ReceiveHidden,
    SendHidden,
    SplitStreams,
    Weight,
)
from ridgeline.core.spec import (
    AttentionSpec,
    EagleSpec,
    LayerInputSpec,
    MedusaSpec,
    ModelSpec,
    MTPSpec,
)
from ridgeline.models.lower_layer import LayerLowering, norm_op


def lower(spec: ModelSpec, *, exit_after: int | None = None) -> tuple[Op, ...]:
    """The ops of a model, or of a stage of it, in order; ``group`` of an op indexes
    ``cache_groups(spec)``.

    ``exit_after`` so many layers the last norm and the head follow at once: the ops of a model that
    exits early (LayerSkip, arXiv 2404.16710, section 4.3).

    Raises:
        SettingsError: the model has no stages, or does not go with its drafter.
    """
    embed = Weight(name="embed", shape=(spec.vocab_size, spec.hidden_size))
    head = embed if spec.tie_embeddings else Weight(name="head", shape=embed.shape)
    group_of = _groups_of_layers(spec)
    states = state_group(spec)
    ops: list[Op] = []
    if spec.layers_here.start:
        ops.append(ReceiveHidden(hidden_size=spec.hidden_size))
    else:
        ops.append(_embed(spec, embed))
        if spec.embedding_norm is not None:
            ops.append(norm_op("x", "x", "embedding_norm", spec.hidden_size, spec.embedding_norm))
    if spec.layer_inputs is not None:
        if len(spec.layers_here) < len(spec.layers):
            raise SettingsError(
                f"This {spec.model_type} model has per-layer embeddings, which its first layers "
                "would have to hand on from stage to stage; leave pipeline_parallel_size out."
            )
        ops.append(_layer_embed(spec, spec.layer_inputs))
    if spec.streams is not None:
        _check_streams(spec)
        ops.append(SplitStreams(weights=_stream_weights(spec, "split")))
    for index in spec.layers_here[:exit_after]:
        ops += _kept_features(spec, index)
        offset = states.offset(index) if states and index in states.layers else 0
        layer = LayerLowering(index, group_of.get(index), spec.hidden_size, offset)
        ops += layer.ops(spec.layers[index], spec.layer_inputs, spec.streams)
    if spec.layers_here.stop < len(spec.layers):
        assert exit_after is None, "a stage has no exit"
        return (*ops, SendHidden(hidden_size=spec.hidden_size))
    ops += _kept_features(spec, len(spec.layers))
    if spec.streams is not None:
        ops.append(JoinStreams(weights=_stream_weights(spec, "join")))
    if spec.final_norm is not None:
        ops.append(norm_op("x", "h", "final_norm", spec.hidden_size, spec.final_norm))
    else:
        last = ops.pop()
        assert isinstance(last, Norm), "hidden states end in a norm"
        ops.append(replace(last, dst="h"))
    if isinstance(spec.draft_head, MTPSpec | MedusaSpec):
        width = spec.hidden_size
        ops.append(KeepFeatures(src="h", first=0, width=width, total=width))
    if not spec.has_head:
        return tuple(ops)
    bias = Weight(name="head_bias", shape=(spec.vocab_size,)) if spec.head_bias else None
    ops.append(Head(weight=head, softcap=spec.logit_softcap, bias=bias, scale=spec.logit_scale))
    return tuple(ops)


def _check_streams(spec: ModelSpec) -> None:
    assert spec.streams is not None
    assert spec.streams.norm.gain
    assert not spec.streams.norm.bias
    assert spec.layer_inputs is not None, "what the first stream is scaled for"
    if isinstance(spec.draft_head, EagleSpec):
        raise SettingsError(
            f"This {spec.model_type} model has several residual streams, and EAGLE-3 reads one; "
            "choose another drafter."
        )


def _stream_weights(spec: ModelSpec, name: str) -> tuple[Weight, ...]:
    """The matrices of all streams but the first."""
    assert spec.streams is not None
    shape = (spec.hidden_size, spec.hidden_size)
    others = range(1, spec.streams.num_streams)
    return tuple(Weight(name=f"streams.{stream}.{name}", shape=shape) for stream in others)


def _kept_features(spec: ModelSpec, num_layers: int) -> list[Op]:
    """What the drafter of a model reads after so many layers."""
    if not isinstance(spec.draft_head, EagleSpec):
        return []
    wanted, width = spec.draft_head.feature_layers, spec.hidden_size
    total = len(wanted) * width
    return [
        KeepFeatures(src="x", first=place * width, width=width, total=total)
        for place, each in enumerate(wanted)
        if each == num_layers
    ]


def _groups_of_layers(spec: ModelSpec) -> dict[int, int]:
    """The group that each layer's K and V are in, its own or those that it reads."""
    groups = enumerate(kv_groups(replace(spec, stage=None)))
    group_of = {layer: index for index, group in groups for layer in group.layers}
    for index, layer in enumerate(spec.layers):
        own = layer.attention
        if isinstance(own, AttentionSpec) and own.kv_layer is not None:
            assert own.kv_layer < index, "K and V of a layer that comes later"
            source = spec.layers[own.kv_layer].attention
            assert isinstance(source, AttentionSpec), "K and V that are not stored as such"
            assert source.kv_layer is None, "K and V of a layer without"
            assert not source.bidirectional, "K and V that are not kept"
            assert not own.bidirectional
            assert kv_shape(own) == kv_shape(source), "K and V of another shape or window"
            group_of[index] = group_of[own.kv_layer]
    return group_of


def _embed(spec: ModelSpec, embed: Weight) -> Embed:
    assert spec.learned_positions is not None or not spec.first_position

    def table(name: str, rows: int | None) -> Weight | None:
        return None if rows is None else Weight(name=name, shape=(rows, spec.hidden_size))

    return Embed(
        weight=embed,
        scale=spec.embedding_scale,
        positions=table("positions", spec.learned_positions),
        first_position=spec.first_position,
        types=table("types", spec.token_types),
        is_tied=spec.tie_embeddings,
    )


def _layer_embed(spec: ModelSpec, inputs: LayerInputSpec) -> LayerEmbed:
    width = len(spec.layers) * inputs.width
    return LayerEmbed(
        table=Weight(name="layer_embed", shape=(inputs.vocab_size, width)),
        projection=Weight(name="layer_projection", shape=(width, spec.hidden_size)),
        gain=Weight(name="layer_projection_norm", shape=(inputs.width,)),
        norm=inputs.norm,
    )
