"""What the reference executor is; see `ridgeline.executors.traits`."""

from ridgeline.core.config import EngineConfig
from ridgeline.core.protocols import Executor
from ridgeline.executors.traits import ExecutorTraits, Models


def _create(models: Models, config: EngineConfig) -> Executor:
    from ridgeline.executors.reference.executor import ReferenceExecutor

    return ReferenceExecutor(models, config.block_tokens)


TRAITS = ExecutorTraits(
    name="reference",
    create=_create,
    computes_float64=True,
    expands=lambda form, _config: form.name,
    dense_attention=True,
    calibrated_formats=("float32", "bfloat16"),
)
