"""Config fields and tensor names of mixtures of experts that families share."""

from collections.abc import Mapping, Sequence

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import GroupScore, MLPSpec, MoESpec, RoutingSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import TensorSource
from ridgeline.models.tensor_names import fused_tensors, layer_tensors

_MAX_EXPERTS = 2**14
_MAX_WIDTH = 2**22

# Config keys that say that there are experts; families without them refuse these.
EXPERT_KEYS = frozenset({"num_experts", "num_local_experts"})


def read_num_experts(config: ConfigReader, *names: str) -> int:
    """The number of experts, under the first of ``names`` that is there."""
    name = next((name for name in names if name in config), names[0])
    return config.integer(name, maximum=_MAX_EXPERTS)


def read_width(config: ConfigReader, name: str) -> int:
    """The width of a feed-forward network."""
    return config.integer(name, maximum=_MAX_WIDTH)


def read_top_k(config: ConfigReader, num_experts: int, *, default: int | None = None) -> int:
    """The number of experts that each token goes to.

    Raises:
        CorruptFileError: it is not between one and all.
    """
    config.ignore("experts_per_token")  # gpt-oss says it twice
    return config.integer("num_experts_per_tok", maximum=num_experts, default=default)


def check_routing(routing: RoutingSpec, num_experts: int) -> None:
    """Raise `CorruptFileError` if groups of experts do not divide evenly, or are too small."""
    groups = routing.groups
    if groups is None:
        return
    if num_experts % groups.num_groups:
        raise CorruptFileError(
            f"config.json gives {num_experts} experts, which n_group, {groups.num_groups}, does "
            "not divide."
        )
    size = num_experts // groups.num_groups
    too_small = groups.score is GroupScore.BEST_TWO and size < 2
    too_few = groups.top_groups * size < routing.top_k
    if groups.top_groups > groups.num_groups or too_small or too_few:
        raise CorruptFileError(
            f"config.json gives topk_group as {groups.top_groups}: with {groups.num_groups} groups "
            f"of {size} experts, {routing.top_k} cannot be chosen so."
        )


def ignore_training(config: ConfigReader) -> None:
    """Accept keys of mixtures of experts that matter for training alone."""
    for name in (
        "aux_loss_alpha", "ep_size", "output_router_logits", "router_aux_loss_coef",
        "router_jitter_noise", "seq_aux",
    ):  # fmt: skip
        config.ignore(name)


def sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: each ``decoder_sparse_step``-th, but not ``mlp_only_layers``.

    Raises:
        UnsupportedModelError: no layer has any.
    """
    step = config.integer("decoder_sparse_step", default=1)
    dense = set(config.integers("mlp_only_layers", minimum=0) or ())
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    if not any(sparse):
        raise UnsupportedModelError("config.json describes experts, but gives them to no layer.")
    return sparse


def num_dense_layers(config: ConfigReader, num_layers: int) -> int:
    """How many layers come before those with experts, by ``mlp_layer_types``; without that, one.

    Raises:
        UnsupportedModelError: dense layers are not first.
    """
    kinds = config.texts("mlp_layer_types")
    if kinds is None:
        return 1
    num_dense = kinds.count("dense")
    if kinds != ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense):
        raise UnsupportedModelError(
            f"config.json gives mlp_layer_types that are not {num_layers} layers, dense ones first."
        )
    return num_dense


def choose_mlps(sparse: Sequence[bool], *, dense: MLPSpec, moe: MoESpec) -> list[MLPSpec | MoESpec]:
    """The feed-forward network of each layer."""
    return [moe if has_experts else dense for has_experts in sparse]


_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

_ROUTED = {
    "router": "mlp.gate",
    **{f"experts.{name}": f"mlp.experts.{{e}}.{module}" for name, module in _PROJECTIONS.items()},
}

QWEN_MOE_TENSORS = layer_tensors(
    {
        **_ROUTED,
        **{f"shared.{name}": f"mlp.shared_expert.{of}" for name, of in _PROJECTIONS.items()},
        "shared.output_gate": "mlp.shared_expert_gate",
    }
)
DEEPSEEK_MOE_TENSORS = layer_tensors(
    {
        **_ROUTED,
        **{f"shared.{name}": f"mlp.shared_experts.{of}" for name, of in _PROJECTIONS.items()},
    }
)
# Where the experts of a layer are one tensor, gates above the rest.
STACKED_FUSED: Mapping[str, tuple[str, ...]] = {
    "model.layers.{i}.mlp.experts.gate_up_proj": (
        "layers.{i}.experts.gate",
        "layers.{i}.experts.up",
    )
}
STACKED_TENSORS = {
    **fused_tensors(STACKED_FUSED),
    "layers.{i}.experts.down": TensorSource(name="model.layers.{i}.mlp.experts.down_proj"),
}
