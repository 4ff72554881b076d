"""How a model is spread over ranks; a pipeline is cut by the price of its layers."""

from dataclasses import replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.context_ranks import MOST_BLOCK_TOKENS, RUN_TOKENS
from ridgeline.core.errors import SettingsError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.settings.kv import SHARED_TIERS
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.models import lower
from ridgeline.models.shard import check_experts
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.pipeline import stage_borders

_SPANS = ((511, 512),) * 8  # of a step that decodes, by whose bytes a model is cut


def layout_of(model: ExecutorModel, config: EngineConfig, executor: str) -> ParallelLayout:
    """How a model is spread.

    Raises:
        SettingsError: there are more stages than layers, ranks do not share the experts,
            or the model cannot be cut.
    """
    tensor, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    expert = config.expert_parallel_size
    if config.context_parallel_size > 1:
        return _of_contexts(config)
    if config.split_feed_forward:
        _check_alone(config, "split_feed_forward")
        return ParallelLayout(splits_operators=True)
    if expert > 1 and expert % tensor:
        raise SettingsError(
            f"expert_parallel_size ({expert}) must be a multiple of tensor_parallel_size "
            f"({tensor}), whose ranks share the experts already; raise it, or leave it out."
        )
    if expert > 1:
        check_experts(model.spec, expert)
    if num_stages == 1:
        return ParallelLayout(tensor=tensor, expert=expert)
    if num_stages > len(model.spec.layers):
        raise SettingsError(
            f"The model has {len(model.spec.layers)} layers, too few for {num_stages} stages; "
            "lower pipeline_parallel_size."
        )
    priced = priced_model(model, executor, kv_cache_dtype=config.kv_cache_dtype)
    borders = stage_borders(layer_costs(priced), num_stages)
    return ParallelLayout(tensor=tensor, expert=expert, pipeline=num_stages, stage_borders=borders)


def _check_alone(config: EngineConfig, setting: str, *others: str) -> None:
    """
    Raises:
        SettingsError: the model is spread in another way besides, or one of ``others`` is set.
    """
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    lacking = {name: getattr(config, name) > 1 for name in sizes}
    lacking |= {name: bool(getattr(config, name)) for name in ("workers", *others)}
    for name, is_set in lacking.items():
        if is_set:
            raise SettingsError(f"{name} does not work with {setting}; leave one out.")


def _of_contexts(config: EngineConfig) -> ParallelLayout:
    others = ("split_feed_forward", "kv_ram_tier_bytes", *SHARED_TIERS)
    _check_alone(config, "context_parallel_size", *others)
    if RUN_TOKENS % config.block_tokens or config.block_tokens > MOST_BLOCK_TOKENS:
        raise SettingsError(
            f"context_parallel_size works with block_tokens of 16, 32 and {MOST_BLOCK_TOKENS}, not "
            f"{config.block_tokens}."
        )
    return ParallelLayout(context=config.context_parallel_size)


def layout_of_draft(target: ParallelLayout) -> ParallelLayout:
    """A draft model is whole in every stage; its matrices are split as the target's are, over ranks
    that exchange with as many."""
    if target.tensor == 1:  # whole
        return ParallelLayout()
    return ParallelLayout(tensor=target.tensor, expert=target.expert)


def layer_costs(model: PricedModel) -> list[float]:
    """Bytes that each layer moves in a step that decodes a few sequences; the embedding is with the
    first layer, and the head with the last."""
    batch = make_batch(_SPANS)
    return [
        sum(op_work(op, batch, model).num_bytes for op in lower(replace(model.spec, stage=stage)))
        for stage in ((layer, layer + 1) for layer in range(len(model.spec.layers)))
    ]
