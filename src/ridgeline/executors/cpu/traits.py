"""What the cpu executor is; see `ridgeline.executors.traits`."""

from ridgeline.core.config import EngineConfig
from ridgeline.core.protocols import Executor
from ridgeline.executors.traits import ExecutorTraits, Models
from ridgeline.kernels.cpu.library import (
    NativeLibraryError,
    chosen_level,
    load_library,
    native_kernels_run,
)
from ridgeline.roofline import PricedModel

KV_SUB_BLOCK = 16  # tokens whose keys lie transposed: a block of KV is some of them


def _create(models: Models, config: EngineConfig) -> Executor:
    from ridgeline.executors.cpu.executor import CPUExecutor
    from ridgeline.executors.cpu.packed_cache import open_packed_cache

    return CPUExecutor(
        models,
        config.block_tokens,
        kv_cache_dtype=config.kv_cache_dtype,
        packed_cache=open_packed_cache(
            config.packed_cache_path,
            config.packed_cache_bytes,
            keep_all=config.weights_memory_bytes is not None,
        ),
        weights_memory_bytes=config.weights_memory_bytes,
    )


def _missing() -> str | None:
    try:
        load_library(chosen_level())
    except NativeLibraryError as error:
        return str(error)
    return None


def _priced(model: PricedModel) -> PricedModel:
    from ridgeline.executors.cpu.pricing import priced

    return priced(model)


TRAITS = ExecutorTraits(
    name="cpu",
    create=_create,
    is_here=native_kernels_run,
    missing=_missing,
    block_multiple=KV_SUB_BLOCK,
    weight_formats=("int8", "int4", "int4-g64", "int4-g128", "int3", "int2"),
    kv_formats=("float32", "float16", "bfloat16", "int8", "fp8", "int4"),
    expands=lambda form, _config: form.name if form.is_float else None,
    priced=_priced,
    is_native=True,
    moves_kv=True,
    streams_weights=True,
    runs_parts=True,
    shares_contexts=True,
    calibrated_formats=("float32", "bfloat16", "int8", "int4"),
)
