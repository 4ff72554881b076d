"""Executors by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import on_load_format
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors.cpu import KV_SUB_BLOCK, CPUExecutor, PackedCache
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference import ReferenceExecutor
from ridgeline.kernels.cpu import native_kernels_run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    block_tokens: int
    quantization: str | None
    kv_cache_dtype: str
    packed_cache: PackedCache | None


Models = Mapping[ModelRole, ExecutorModel]
Factory = Callable[[Models, _Options], Executor]


def _reference(models: Models, options: _Options) -> Executor:
    if options.quantization is not None:
        raise InvalidRequestError("The reference executor does not quantize weights; use cpu.")
    if options.kv_cache_dtype != "auto":
        raise InvalidRequestError("The reference executor stores KV as it computes; use cpu.")
    return ReferenceExecutor(models, options.block_tokens)


def _cpu(models: Models, options: _Options) -> Executor:
    quantization = options.quantization
    return CPUExecutor(
        models,
        options.block_tokens,
        quantization=None if quantization is None else on_load_format(quantization),
        kv_cache_dtype=options.kv_cache_dtype,
        packed_cache=options.packed_cache,
    )


_FACTORIES: dict[str, Factory] = {"reference": _reference, "cpu": _cpu}


def executor_names() -> tuple[str, ...]:
    """The names that `create_executor` takes beside ``auto``."""
    return tuple(_FACTORIES)


def default_executor(*, block_tokens: int = 16, dtype: torch.dtype = torch.float32) -> str:
    """The name that ``auto`` stands for: the fastest that runs here and can do what is asked."""
    fits = block_tokens % KV_SUB_BLOCK == 0 and dtype != torch.float64
    return "cpu" if fits and native_kernels_run() else "reference"


def create_executor(
    name: str,
    models: Models,
    *,
    block_tokens: int,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    packed_cache: PackedCache | None = None,
) -> Executor:
    """Build the executor called ``name`` (or the best one here, for ``auto``).

    ``quantization`` is a format of `core.formats.ON_LOAD`; ``kv_cache_dtype`` is auto, or a format
    that the executor can store KV in; ``packed_cache`` is where cpu keeps packed weights.

    Raises:
        InvalidRequestError: there is none of that name, or it lacks an option.
    """
    if name == "auto":
        name = default_executor(block_tokens=block_tokens, dtype=models[ModelRole.TARGET].dtype)
    factory = _FACTORIES.get(name)
    if factory is None:
        raise InvalidRequestError(
            f"Unknown executor {name!r}; choose auto or one of {', '.join(_FACTORIES)}."
        )
    options = _Options(
        block_tokens=block_tokens,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        packed_cache=packed_cache,
    )
    return factory(models, options)
