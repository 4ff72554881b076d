"""What the reference executor is; see `ridgeline.executors.traits`."""

from ridgeline.core.protocols import Executor
from ridgeline.executors.traits import ExecutorTraits, Models, Options


def _create(models: Models, options: Options) -> Executor:
    from ridgeline.executors.reference.executor import ReferenceExecutor

    return ReferenceExecutor(models, options.block_tokens)


TRAITS = ExecutorTraits(
    name="reference",
    create=_create,
    computes_float64=True,
    expands=lambda form, _config: form.name,
    dense_attention=True,
    calibrated_formats=("float32", "bfloat16"),
)
