"""What sequences keep of their tokens, by layers that keep it alike: K and V, or states."""

from dataclasses import dataclass

from ridgeline.core.spec import (
    AttentionSpec,
    GatedDeltaSpec,
    Mamba2Spec,
    MLASpec,
    ModelSpec,
    ShortConvSpec,
    StateSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose K and V are stored alike, and so share one block table per request.

    ``k_width`` and ``v_width`` are elements per KV head. Latent attention stores one "head" of K,
    the latent, and no V.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_width: int
    v_width: int
    window: int | None

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token adds, over all layers of the group."""
        return len(self.layers) * self.num_kv_heads * (self.k_width + self.v_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Layers that keep a state of fixed size for each sequence instead of K and V of its tokens.

    ``elements[i]`` are those of layer ``layers[i]``, in float32; a sequence's state has those of
    all layers, one after the other.
    """

    layers: tuple[int, ...]
    elements: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of one sequence's state."""
        return 4 * sum(self.elements)

    def offset(self, layer: int) -> int:
        """Elements before those of a layer."""
        return sum(self.elements[: self.layers.index(layer)])


CacheGroup = KVGroup | StateGroup


def cache_groups(spec: ModelSpec) -> tuple[CacheGroup, ...]:
    """What sequences keep of their tokens: `kv_groups`, and the states, if there are some, last."""
    states = state_group(spec)
    return kv_groups(spec) if states is None else (*kv_groups(spec), states)


def state_group(spec: ModelSpec) -> StateGroup | None:
    """The layers of a model that keep states; ``None`` if all keep K and V."""
    sizes = {
        index: _state_elements(layer.state, spec.hidden_size)
        for index, layer in enumerate(spec.layers)
        if layer.state is not None and index in spec.layers_here
    }
    return StateGroup(layers=tuple(sizes), elements=tuple(sizes.values())) if sizes else None


def _state_elements(spec: StateSpec, hidden_size: int) -> int:
    match spec:
        case ShortConvSpec():
            return (spec.length - 1) * hidden_size
        case GatedDeltaSpec():
            matrices = spec.num_value_heads * spec.key_dim * spec.value_dim
            return (spec.conv_length - 1) * spec.num_channels + matrices
        case Mamba2Spec():
            return (spec.conv_length - 1) * spec.num_channels + spec.width * spec.state_dim


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """The KV groups of a model, in order of their first layer.

    Layers that are bidirectional, or read the K and V of another, are in none. Those of a drafter
    that reads hidden states are numbered behind the model's.

    A pipeline's stage has all groups, each with those of its layers that are the stage's.
    """
    members: dict[tuple[int, int, int, int | None], list[int]] = {}
    drafting = () if spec.draft_head is None else spec.draft_head.layers
    for index, layer in enumerate((*spec.layers, *drafting)):
        mixer = layer.attention
        if isinstance(mixer, MLASpec) or (
            isinstance(mixer, AttentionSpec) and not mixer.bidirectional and mixer.kv_layer is None
        ):
            members.setdefault(kv_shape(mixer), []).append(index)
    return tuple(
        KVGroup(
            layers=tuple(
                layer for layer in layers if layer in spec.layers_here or layer >= len(spec.layers)
            ),
            num_kv_heads=heads,
            k_width=k_width,
            v_width=v_width,
            window=window,
        )
        for (heads, k_width, v_width, window), layers in members.items()
    )


def shares_kv(spec: ModelSpec) -> bool:
    """Whether some layers read the K and V of others."""
    mixers = (layer.attention for layer in spec.layers)
    return any(isinstance(each, AttentionSpec) and each.kv_layer is not None for each in mixers)


def kv_shape(attention: AttentionSpec | MLASpec) -> tuple[int, int, int, int | None]:
    """KV heads, widths of K and V, and the window."""
    if isinstance(attention, MLASpec):
        return 1, attention.latent_dim + attention.rope_dim, 0, None
    return attention.num_kv_heads, attention.head_dim, attention.head_dim, attention.window
