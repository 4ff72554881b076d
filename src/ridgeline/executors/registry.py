"""Executors by name. What one of them needs is imported when it is made."""

from typing import TYPE_CHECKING

from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import number_format
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors.cpu.traits import TRAITS as CPU
from ridgeline.executors.cuda.traits import TRAITS as CUDA
from ridgeline.executors.reference.traits import TRAITS as REFERENCE
from ridgeline.executors.traits import ExecutorTraits, Models, Options

if TYPE_CHECKING:
    import torch

# The slowest first: ``auto`` takes the last that runs here and can do what is asked.
_TRAITS = {traits.name: traits for traits in (REFERENCE, CPU, CUDA)}

TUNED = CUDA.name  # what a machine of the catalogue is taken to run has its formats, and more


def executor_names() -> tuple[str, ...]:
    """The names that `create_executor` takes beside ``auto``."""
    return tuple(_TRAITS)


def executor_traits(name: str) -> ExecutorTraits:
    """What the executor of that name is.

    Raises:
        SettingsError: there is none.
    """
    if name not in _TRAITS:
        known = ", ".join(_TRAITS)
        raise SettingsError(f"Unknown executor {name!r}; choose auto or one of {known}.")
    return _TRAITS[name]


def default_executor(*, block_tokens: int = 16, dtype: "torch.dtype | None" = None) -> str:
    """The name that ``auto`` stands for: the fastest that runs here and can do what is asked."""
    return next(
        name
        for name, traits in reversed(_TRAITS.items())
        if (traits.computes_float64 or str(dtype) != "torch.float64")
        and block_tokens % traits.block_multiple == 0
        and traits.is_here()
    )


def create_executor(
    name: str,
    models: Models,
    *,
    block_tokens: int,
    kv_cache_dtype: str = "auto",
    packed_cache_path: str = "off",
    packed_cache_bytes: int = 50 * 2**30,
    max_num_seqs: int = 64,
    gpu_memory_utilization: float | None = None,
    attention_backend: str = "auto",
    tuning_cache_path: str = "off",
) -> Executor:
    """Build the executor called ``name`` (or the best one here, for ``auto``).

    ``kv_cache_dtype`` is auto, or a format that the executor can store KV in; cpu keeps packed
    weights where ``packed_cache_path`` says, in ``packed_cache_bytes`` at the most; cuda makes room
    for ``max_num_seqs`` sequences within ``gpu_memory_utilization`` of the memory (without it 0.9),
    attends by ``attention_backend``, and keeps the tiles that it times where ``tuning_cache_path``
    says.

    Raises:
        SettingsError: there is none of that name, or it lacks an option.
        MachineError: it cannot run on this machine.
    """
    if name == "auto":
        name = default_executor(block_tokens=block_tokens, dtype=models[ModelRole.TARGET].dtype)
    traits = executor_traits(name)
    for setting, is_given in (
        ("gpu_memory_utilization", gpu_memory_utilization is not None),
        ("attention_backend", attention_backend != "auto"),
        ("tuning_cache_path", tuning_cache_path not in ("auto", "off")),
    ):
        if is_given and setting not in traits.settings:
            owner = next(each.name for each in _TRAITS.values() if setting in each.settings)
            raise SettingsError(
                f"{setting} is of the {owner} executor, and this is {name}; leave it out."
            )
    kv = None if kv_cache_dtype == "auto" else number_format(kv_cache_dtype)
    for model in models.values():
        traits.check_formats(model.quantization, kv)
    options = Options(
        block_tokens=block_tokens,
        kv_cache_dtype=kv_cache_dtype,
        packed_cache_path=packed_cache_path,
        packed_cache_bytes=packed_cache_bytes,
        max_num_seqs=max_num_seqs,
        gpu_memory_utilization=gpu_memory_utilization,
        attention_backend=attention_backend,
        tuning_cache_path=tuning_cache_path,
    )
    return traits.create(models, options)
