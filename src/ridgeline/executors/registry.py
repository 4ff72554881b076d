"""Executors by name. What one of them needs is imported when it is made."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import cast

from ridgeline.core.cache_groups import shares_kv, state_group
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.kv_formats import check_kv_format, kv_number_format
from ridgeline.core.ops import Attend, BidirectionalAttend
from ridgeline.core.parts import load_part, part_names
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.core.settings.kv import SHARED_TIERS
from ridgeline.core.settings.reading import default_of
from ridgeline.executors.cpu.traits import TRAITS as CPU
from ridgeline.executors.cuda.traits import TRAITS as CUDA
from ridgeline.executors.reference.traits import TRAITS as REFERENCE
from ridgeline.executors.traits import ExecutorTraits, Models

_log = logging.getLogger(__name__)

# The slowest first: ``auto`` takes the last that runs here and can do what is asked.
_TRAITS = {traits.name: traits for traits in (REFERENCE, CPU, CUDA)}

TUNED = CUDA.name  # what a machine of the catalogue is taken to run has its formats, and more


def executor_names() -> tuple[str, ...]:
    """The names that `create_executor` takes beside ``auto``."""
    return (*_TRAITS, *part_names("executors"))


def executor_traits(name: str) -> ExecutorTraits:
    """What the executor of that name is: ours, or an `ExecutorTraits` of the group
    ``ridgeline.executors``.

    Raises:
        SettingsError: there is none.
    """
    traits = _TRAITS.get(name) or load_part("executors", name)
    if traits is None:
        known = ", ".join(executor_names())
        raise SettingsError(f"Unknown executor {name!r}; choose auto or one of {known}.")
    return cast(ExecutorTraits, traits)


def default_executor(
    *,
    block_tokens: int = 16,
    dtype: str | None = None,
    encodes: bool = False,
    has_states: bool = False,
    has_shared_kv: bool = False,
) -> str:
    """The name that ``auto`` stands for: the fastest that runs here and can do what is asked."""
    return next(
        name
        for name, traits in reversed(_TRAITS.items())
        if (traits.computes_float64 or dtype != "float64")
        and block_tokens % traits.block_multiple == 0
        and (traits.runs_encoders or not encodes)
        and (traits.keeps_states or not has_states)
        and (traits.shares_kv or not has_shared_kv)
        and traits.is_here()
    )


def create_executor(models: Models, config: EngineConfig) -> Executor:
    """Build the executor called ``config.executor`` (or the best one here, for ``auto``).

    Raises:
        SettingsError: there is none of that name, or it lacks what is set.
        MachineError: it cannot run on this machine.
    """
    name, target = config.executor, models[ModelRole.TARGET]
    encodes = not target.spec.has_head or any(
        isinstance(op, BidirectionalAttend) for op in target.ops
    )
    if name == "auto":
        name = default_executor(
            block_tokens=config.block_tokens,
            dtype=target.dtype,
            encodes=encodes,
            has_states=state_group(target.spec) is not None,
            has_shared_kv=shares_kv(target.spec),
        )
    traits = executor_traits(name)
    if encodes and not traits.runs_encoders:
        raise SettingsError(
            f"The {name} executor runs models that generate text, and this one of type "
            f"{target.spec.model_type} is an encoder or a classifier; use the cpu executor."
        )
    _check_caches(models, config, traits)
    _check_settings(config, traits)
    _check_formats(models, config, traits)
    _check_streaming(config, traits)
    _check_shared_kv(models, config, traits)
    _check_launcher(config)
    if config.num_ranks == 1 and config.workers == 0:
        return traits.create(models, config)
    _check_parts(config, traits)
    from ridgeline.executors.distributed.executor import DistributedExecutor

    return DistributedExecutor(models, config, name)


def _check_settings(config: EngineConfig, traits: ExecutorTraits) -> None:
    """
    Raises:
        SettingsError: what is set is of another executor.
    """
    for owner in _TRAITS.values():
        for field in () if owner is traits or owner.settings is None else fields(owner.settings):
            if getattr(config, field.name) not in (default_of(field), "off"):
                raise SettingsError(
                    f"{field.name} is of the {owner.name} executor, and this is {traits.name}; "
                    "leave it out."
                )


def _check_formats(models: Models, config: EngineConfig, traits: ExecutorTraits) -> None:
    """Warns of formats of KV that cost much quality.

    Raises:
        SettingsError: weights or KV are to be in a format that the executor lacks.
    """
    kv = kv_number_format(config.kv_cache_dtype)
    for model in models.values():
        traits.check_formats(model.quantization, kv)
        check_kv_format(model.spec, kv)
        has_sinks = any(isinstance(op, Attend) and op.sinks is not None for op in model.ops)
        if kv is not None and kv.is_quantized and has_sinks:
            _log.warning(
                "K and V are stored in %s, and models with attention sinks (%s) lose much by it: "
                "of gpt-oss, llama.cpp with KV in 8 bits (q8_0) chose the same token as without in "
                "75 of 100 places. Measure it with `ridgeline eval`, or leave kv_cache_dtype out.",
                kv.name, model.spec.model_type,
            )  # fmt: skip


def _check_launcher(config: EngineConfig) -> None:
    """
    Raises:
        SettingsError: there is nothing on other machines that Ray could start.
    """
    if config.launcher == "local" or config.workers > 0:
        return
    one_machine = {
        "split_feed_forward": config.split_feed_forward,
        "context_parallel_size": config.context_parallel_size > 1,
    }
    if name := _first_set(one_machine):
        raise SettingsError(
            f"launcher ray starts workers and replicas, and the processes of {name} share one "
            "machine: leave one of both out."
        )
    raise SettingsError(
        "launcher ray starts workers and replicas, and ranks with tensor_parallel_size or "
        "expert_parallel_size alone share one machine: set `workers`, and "
        "pipeline_parallel_size to one more."
    )


def _check_parts(config: EngineConfig, traits: ExecutorTraits) -> None:
    """
    Raises:
        SettingsError: the executor runs no such parts of models.
    """
    if not traits.runs_parts:
        able = ", ".join(each.name for each in _TRAITS.values() if each.runs_parts)
        raise SettingsError(
            f"The {traits.name} executor runs no parts of models; tensor_parallel_size, "
            "pipeline_parallel_size, expert_parallel_size, context_parallel_size and "
            f"split_feed_forward are for {able}."
        )
    if config.context_parallel_size > 1 and not traits.shares_contexts:
        able = ", ".join(each.name for each in _TRAITS.values() if each.shares_contexts)
        raise SettingsError(
            f"context_parallel_size is of the {able} executor, and this is {traits.name}; leave "
            "it out."
        )


def _check_streaming(config: EngineConfig, traits: ExecutorTraits) -> None:
    """
    Raises:
        SettingsError: weights are to stay on disk, and cannot.
    """
    if config.weights_memory_bytes is None:
        return
    if not traits.streams_weights:
        raise SettingsError(
            f"The {traits.name} executor keeps weights in memory; weights_memory_bytes is of cpu."
        )
    if config.num_ranks > 1:
        raise SettingsError(
            "weights_memory_bytes does not work with tensor_parallel_size, "
            "pipeline_parallel_size, expert_parallel_size, context_parallel_size or "
            "split_feed_forward."
        )


def _check_shared_kv(models: Models, config: EngineConfig, traits: ExecutorTraits) -> None:
    """
    Raises:
        SettingsError: what drafts is to use the target's KV, and cannot.
    """
    drafting = [model for model in models.values() if model.shares_kv]
    if not drafting:
        return
    lacking = {
        f"the {traits.name} executor": not traits.lends_kv,
        "weights_memory_bytes": config.weights_memory_bytes is not None,
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "expert_parallel_size": config.expert_parallel_size > 1,
        "context_parallel_size": config.context_parallel_size > 1,
        "split_feed_forward": config.split_feed_forward,
        "workers": config.workers > 0,
    }
    if name := _first_set(lacking):
        raise SettingsError(
            f"{name} does not draft with the first layers of the model itself; take another "
            "`speculation` than exit, and leave draft_layers out."
            if drafting[0].is_exit
            else f"{name} does not keep hidden states for a drafter; take another `speculation` "
            f"than {config.speculation}, or another draft_model."
        )


def _first_set(lacking: Mapping[str, bool]) -> str | None:
    return next((name for name, is_set in lacking.items() if is_set), None)


def _check_caches(models: Models, config: EngineConfig, traits: ExecutorTraits) -> None:
    """
    Raises:
        SettingsError: a model keeps states or shares KV among layers, which something that is set
            cannot deal with.
    """
    for role, model in models.items():
        if not traits.shares_kv and shares_kv(model.spec):
            raise SettingsError(
                f"Layers of the family {model.spec.model_type} read K and V of other layers, which "
                f"the {traits.name} executor does not support; use the cpu executor."
            )
        if state_group(model.spec) is None:
            continue
        family = model.spec.model_type
        if role is ModelRole.DRAFT:
            raise SettingsError(
                f"A draft model of the family {family} keeps states of its sequences, which cannot "
                "be taken back where the target rejects its tokens; name another draft_model."
            )
        lacking = {
            f"the {traits.name} executor": not traits.keeps_states,
            f"speculation {config.speculation}": config.speculation in ("exit", "lookahead"),
            "a drafter that reads hidden states": any(
                each.spec.draft_head is not None for each in models.values()
            ),
            "draft_shape tree": config.speculation != "off" and config.draft_shape == "tree",
            "kv_ram_tier_bytes": config.kv_ram_tier_bytes > 0,
            "tensor_parallel_size": config.tensor_parallel_size > 1,
            **{name: bool(getattr(config, name)) for name in SHARED_TIERS},
        }
        if name := _first_set(lacking):
            raise SettingsError(
                f"{name} does not work with models of the family {family}, which keep states "
                "of their sequences beside KV."
            )
