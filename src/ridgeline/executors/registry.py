"""Executors by name. What one of them needs is imported when it is chosen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgeline.core.errors import MachineError, SettingsError
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference import ReferenceExecutor
from ridgeline.kernels.gpu import missing_for_gpu

if TYPE_CHECKING:
    from ridgeline.executors.cpu import PackedCache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    block_tokens: int
    kv_cache_dtype: str
    packed_cache: "PackedCache | None"
    max_num_seqs: int
    gpu_memory_utilization: float
    attention_backend: str
    tuning_cache_path: str


DEFAULT_GPU_MEMORY_SHARE = 0.9

Models = Mapping[ModelRole, ExecutorModel]
Factory = Callable[[Models, _Options], Executor]


def _wants_fp8(models: Models, options: _Options) -> bool:
    forms = [model.quantization for model in models.values()]
    return "fp8" in (options.kv_cache_dtype, *(form and form.name for form in forms))


def _reference(models: Models, options: _Options) -> Executor:
    if any(model.quantization is not None for model in models.values()):
        raise SettingsError("The reference executor does not quantize weights; use cpu.")
    if options.kv_cache_dtype != "auto":
        raise SettingsError("The reference executor stores KV as it computes; use cpu.")
    return ReferenceExecutor(models, options.block_tokens)


def _cpu(models: Models, options: _Options) -> Executor:
    from ridgeline.executors.cpu import CPUExecutor

    if _wants_fp8(models, options):
        raise SettingsError("The cpu executor has no fp8; use int8.")
    return CPUExecutor(
        models,
        options.block_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
        packed_cache=options.packed_cache,
    )


def _cuda(models: Models, options: _Options) -> Executor:
    reason = missing_for_gpu()
    if reason is not None:
        raise MachineError(f"The cuda executor cannot run here: {reason}")
    from ridgeline.executors.cuda.executor import CUDAExecutor
    from ridgeline.executors.cuda.opening import (
        check_fp8,
        check_int4,
        gpu_attention,
        gpu_tuning,
        open_gpu,
    )

    target = models[ModelRole.TARGET]
    if target.dtype == torch.float64:
        raise SettingsError("The cuda executor has no float64; use the reference executor.")
    if _wants_fp8(models, options):
        check_fp8()
    if any(model.quantization and model.quantization.bits == 4 for model in models.values()):
        check_int4()
    device, kernels = open_gpu()
    return CUDAExecutor(
        models,
        options.block_tokens,
        device=device,
        kernels=kernels,
        kv_cache_dtype=options.kv_cache_dtype,
        num_slots=options.max_num_seqs,
        memory_share=options.gpu_memory_utilization,
        attention=gpu_attention(options.attention_backend),
        tuning=gpu_tuning(options.tuning_cache_path),
        warm_up=True,
    )


_FACTORIES: dict[str, Factory] = {"reference": _reference, "cpu": _cpu, "cuda": _cuda}


def executor_names() -> tuple[str, ...]:
    """The names that `create_executor` takes beside ``auto``."""
    return tuple(_FACTORIES)


def missing_for(name: str) -> str | None:
    """One sentence on why an executor cannot run on this machine; ``None`` if it can."""
    if name == "cuda":
        return missing_for_gpu()
    if name == "cpu":
        from ridgeline.kernels.cpu.library import NativeLibraryError, chosen_level, load_library

        try:
            load_library(chosen_level())
        except NativeLibraryError as error:
            return str(error)
    return None


def default_executor(*, block_tokens: int = 16, dtype: torch.dtype = torch.float32) -> str:
    """The name that ``auto`` stands for: the fastest that runs here and can do what is asked."""
    from ridgeline.executors.cpu import KV_SUB_BLOCK
    from ridgeline.kernels.cpu.library import native_kernels_run

    if dtype == torch.float64:
        return "reference"
    if missing_for_gpu() is None:
        return "cuda"
    return "cpu" if block_tokens % KV_SUB_BLOCK == 0 and native_kernels_run() else "reference"


def create_executor(
    name: str,
    models: Models,
    *,
    block_tokens: int,
    kv_cache_dtype: str = "auto",
    packed_cache: "PackedCache | None" = None,
    max_num_seqs: int = 64,
    gpu_memory_utilization: float | None = None,
    attention_backend: str = "auto",
    tuning_cache_path: str = "off",
) -> Executor:
    """Build the executor called ``name`` (or the best one here, for ``auto``).

    ``kv_cache_dtype`` is auto, or a format that the executor can store KV in; ``packed_cache`` is
    where cpu keeps packed weights; cuda makes room for ``max_num_seqs`` sequences within
    ``gpu_memory_utilization`` of the memory (without it 0.9), attends by ``attention_backend``, and
    keeps the tiles that it times where ``tuning_cache_path`` says.

    Raises:
        SettingsError: there is none of that name, or it lacks an option.
        MachineError: it cannot run on this machine.
    """
    if name == "auto":
        name = default_executor(block_tokens=block_tokens, dtype=models[ModelRole.TARGET].dtype)
    factory = _FACTORIES.get(name)
    if factory is None:
        raise SettingsError(
            f"Unknown executor {name!r}; choose auto or one of {', '.join(_FACTORIES)}."
        )
    for setting, is_given in (
        ("gpu_memory_utilization", gpu_memory_utilization is not None),
        ("attention_backend", attention_backend != "auto"),
        ("tuning_cache_path", tuning_cache_path not in ("auto", "off")),
    ):
        if is_given and name != "cuda":
            raise SettingsError(
                f"{setting} is of the cuda executor, and this is {name}; leave it out."
            )
    options = _Options(
        block_tokens=block_tokens,
        kv_cache_dtype=kv_cache_dtype,
        packed_cache=packed_cache,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization or DEFAULT_GPU_MEMORY_SHARE,
        attention_backend=attention_backend,
        tuning_cache_path=tuning_cache_path,
    )
    return factory(models, options)
