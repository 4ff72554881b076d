"""What the cuda executor is; see `ridgeline.executors.traits`."""

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import MachineError, SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.kv_formats import with_scales
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.core.settings.executors import CUDASettings
from ridgeline.executors.cuda.formats import device_formats
from ridgeline.executors.traits import ExecutorTraits, Models
from ridgeline.kernels.gpu import missing_for_gpu
from ridgeline.roofline import PricedModel

DEFAULT_MEMORY_SHARE = 0.9


def _create(models: Models, config: EngineConfig) -> Executor:
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

    if models[ModelRole.TARGET].dtype == "float64":
        raise SettingsError("The cuda executor has no float64; use the reference executor.")
    forms = [form for model in models.values() if (form := model.quantization) is not None]
    if "fp8" in (config.kv_cache_dtype, *(form.name for form in forms)):
        check_fp8()
    if any(form.bits == 4 for form in forms):
        check_int4()
    device, kernels = open_gpu()
    return CUDAExecutor(
        models,
        config.block_tokens,
        device=device,
        kernels=kernels,
        kv_cache_dtype=config.kv_cache_dtype,
        num_slots=config.max_num_seqs,
        memory_share=config.gpu_memory_utilization or DEFAULT_MEMORY_SHARE,
        attention=gpu_attention(config.attention_backend),
        tuning=gpu_tuning(config.tuning_cache_path),
        warm_up=True,
    )


def _expands(form: NumberFormat, config: Mapping[str, object]) -> str | None:
    """Codes into a table (NF4, FP4, MXFP4), and columns out of the order of their groups."""
    if config.get("desc_act") is True and form.group_size is not None:
        return "act-order GPTQ"
    return form.name.upper() if form.is_float and form.bits <= 4 else None


def _priced(model: PricedModel) -> PricedModel:
    own = device_formats(model.ops, model.activations.name, model.weights)
    return replace(
        model,
        weights=None,
        weight_formats={**own, **model.weight_formats},
        kv=None if model.kv is None else with_scales(model.kv),
    )


def _device_bytes() -> float:
    import torch

    return float(torch.cuda.mem_get_info()[1])


TRAITS = ExecutorTraits(
    name="cuda",
    keeps_states=False,
    shares_kv=False,
    lends_kv=False,
    create=_create,
    is_here=lambda: missing_for_gpu() is None,
    missing=missing_for_gpu,
    runs_encoders=False,
    weight_formats=("int8", "int4", "int4-g64", "int4-g128", "fp8"),
    kv_formats=("float32", "float16", "bfloat16", "int8", "fp8"),
    compresses_kv=False,
    settings=CUDASettings,
    expands=_expands,
    priced=_priced,
    own_bench="A GPU has a benchmark of its own: make bench-gpu.",
    device_bytes=_device_bytes,
)
