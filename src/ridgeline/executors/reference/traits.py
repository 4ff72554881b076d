"""What the reference executor is; see `ridgeline.executors.traits`."""

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import MissingDependencyError
from ridgeline.core.protocols import Executor
from ridgeline.executors.traits import ExecutorTraits, Models, has_torch, needs_torch


def _missing() -> str | None:
    return None if has_torch() else needs_torch("reference")


def _create(models: Models, config: EngineConfig) -> Executor:
    reason = _missing()
    if reason is not None:
        raise MissingDependencyError(reason)
    from ridgeline.executors.reference.executor import ReferenceExecutor

    return ReferenceExecutor(models, config.block_tokens, kv_cache_dtype=config.kv_cache_dtype)


TRAITS = ExecutorTraits(
    name="reference",
    create=_create,
    missing=_missing,
    computes_float64=True,
    kv_formats=("int8", "fp8", "int4"),
    expands=lambda form, _config: form.name,
    dense_attention=True,
    moves_kv=True,
    runs_parts=True,
    calibrated_formats=("float32", "bfloat16"),
)
