"""The roofline of an engine: an observer of its steps, with this machine's calibration if any."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from msgspec.structs import replace as replace_fields

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import CorruptFileError, DiskError
from ridgeline.core.expert_load import ExpertLoad, expert_load
from ridgeline.core.ops import MoE, Op
from ridgeline.core.parallel_layout import Link, ParallelLayout, borders
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor, StepTimePredictor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.kernels.cpu.library import native_level
from ridgeline.roofline import history
from ridgeline.roofline.calibration import (
    Calibration,
    calibration_path,
    describe,
    load,
    measured_elsewhere,
)
from ridgeline.roofline.live import Observer
from ridgeline.roofline.memory import weights_bytes
from ridgeline.roofline.predict import StepPredictor
from ridgeline.scheduler import DEFAULT_PREDICTOR

_log = logging.getLogger(__name__)


def make_observer(
    config: EngineConfig, models: Mapping[ModelRole, ExecutorModel], executor: Executor
) -> Observer:
    """An observer; without a calibration of the executor it counts, and has no ceilings."""
    priced = {
        role: replace(
            priced_model(
                with_exchanges(model, executor, role),
                executor.name,
                kv_cache_dtype=config.kv_cache_dtype,
                held=executor.weight_formats(role),
            ),
            layout=ParallelLayout(context=executor.kv_layout(role).context_ranks),
            block_tokens=config.block_tokens,
        )
        for role, model in models.items()
    }
    try:
        calibration = load(calibration_path(executor.name))
    except CorruptFileError as error:
        _log.warning("%s", error)
        calibration = None
    if calibration is not None and (elsewhere := measured_elsewhere(calibration, native_level())):
        _log.warning("%s", elsewhere)
        calibration = None
    if calibration is not None and (link := executor.link) is not None:
        calibration = with_link(calibration, link)
    if config.weights_memory_bytes is not None:
        calibration = None  # its steps do not wait for a disk, and are not to be corrected by those
    _log.info("The seconds of steps are predicted by a model that is %s.", describe(calibration))
    return Observer(
        priced,
        StepPredictor(priced, calibration) if calibration else None,
        experts=partial(load_of_experts, executor),
    )


def load_of_experts(executor: Executor) -> ExpertLoad | None:
    """How an executor's tokens were spread over experts, and over the ranks that share them."""
    return expert_load(executor.expert_tokens(), executor.layout_for().expert_ranks)


def with_exchanges(model: ExecutorModel, executor: Executor, role: ModelRole) -> ExecutorModel:
    """Ranks of one machine share its memory and its processors: together they are one process that
    has to exchange, too. What each expert- or context-parallel rank has whole is computed by all of
    them."""
    layout = executor.layout_for(role)
    if layout.num_ranks == 1:
        return model
    ops: list[Op] = []
    for op in model.ops:
        if isinstance(op, MoE) and layout.expert_ranks > 1:
            ops.append(replace(op, borders=borders(op.router.shape[0], layout.expert_ranks)))
        else:
            ops.extend([op] * layout.num_copies)
    return replace(model, ops=(*ops, *executor.exchanges(role)))


def with_link(calibration: Calibration, link: Link) -> Calibration:
    """A machine's calibration with what its ranks measured of their exchanges."""
    ceilings = replace(
        calibration.ceilings,
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_s,
    )
    return replace_fields(calibration, ceilings=ceilings)


def step_predictor(observer: Observer) -> StepTimePredictor:
    """What the scheduler predicts steps with.

    Without a calibration proportions alone are known; those of the models are of their weights.
    """
    if observer.predictor is not None:
        return observer.predictor
    sizes = {role: weights_bytes(model) for role, model in observer.models.items()}
    share = sizes.get(ModelRole.DRAFT, 0.0) / sizes[ModelRole.TARGET]
    return replace(DEFAULT_PREDICTOR, draft_share=min(1.0, share))


def keep_errors(observer: Observer, *, model: str, executor: str) -> None:
    """Note how far off this run's predictions were, for those who read the next ones."""
    try:
        weights = observer.models[ModelRole.TARGET].main_format.name
        history.record(observer.report(), model=model, executor=executor, weights=weights)
    except DiskError as error:
        _log.warning("%s", error)
