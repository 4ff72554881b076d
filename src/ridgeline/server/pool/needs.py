"""What a model takes of memory and time, before it is loaded; and what is known of it then."""

from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import float_format, number_format, on_load_format
from ridgeline.engine.client import EngineClient
from ridgeline.engine.loading import ModelDescription
from ridgeline.executors import default_executor, executor_traits
from ridgeline.models import lower
from ridgeline.quant.declared import declared_formats
from ridgeline.roofline import PricedModel
from ridgeline.roofline.memory import (
    activation_bytes,
    num_parameters,
    rank_pool_bytes,
    weights_bytes,
)

_PROCESS_BYTES = {True: 96 << 20, False: 320 << 20}  # without model, by whether torch is left out
PROCESS_S = 1.5  # until it reads weights
DISK_BYTES_PER_S = 1e9  # until loads have been measured
_KV_SEQUENCES = 8
_KV_TOKENS = 2048  # of each of them
_LEAST_TOKENS = 256  # of context, below which a model is of no use


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What lists of models say of one. ``root`` is the folder, file or name that it came from."""

    root: str
    context: int
    family: str
    num_parameters: int
    weights_bytes: int
    weights_format: str
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """``step_bytes`` are those of activations; ``config`` has the size of the KV pool."""

    facts: ModelFacts
    config: EngineConfig
    kv_bytes: int
    step_bytes: int
    process_bytes: int

    @property
    def num_bytes(self) -> int:
        """All that the process is expected to take."""
        return self.facts.weights_bytes + self.kv_bytes + self.step_bytes + self.process_bytes

    def measured_bytes(self, kv_bytes: int, resident_bytes: int) -> int:
        """All that it will take, by what is resident once it is loaded and its KV pool is empty."""
        resident = max(resident_bytes, self.facts.weights_bytes)
        return resident + kv_bytes + self.config.kv_ram_tier_bytes + self.step_bytes


def needs_of(config: EngineConfig, model: ModelDescription, budget_bytes: int) -> ModelNeeds:
    """What a model needs of a budget: a KV pool of eight sequences of 2,048 tokens, unless the
    settings say more or less, but no more than the budget leaves.

    A model that cannot fit needs more than the budget.
    """
    name = default_executor() if config.executor == "auto" else config.executor
    traits = executor_traits(name)
    priced = traits.priced(_priced(config, model))
    process = _PROCESS_BYTES[traits.is_native]
    weights = int(weights_bytes(priced))
    if model.folder is not None and model.folder.is_file():  # GGUF: its formats are in its tensors
        weights = max(model.folder.stat().st_size, 1)
    spec = model.definition.spec
    step = int(activation_bytes(priced, tokens=config.max_num_batched_tokens, rows=1))

    def pool_bytes(tokens: int) -> int:
        return int(rank_pool_bytes(priced, tokens, block_tokens=config.block_tokens))

    context = config.max_model_len or spec.max_position
    least = pool_bytes(config.max_model_len or min(context, _LEAST_TOKENS))
    kv = config.kv_cache_memory_bytes
    if kv is None:
        wanted = min(config.max_num_seqs, _KV_SEQUENCES) * pool_bytes(min(context, _KV_TOKENS))
        left = budget_bytes - weights - step - process - config.kv_ram_tier_bytes
        kv = max(least, min(wanted, left))
    return ModelNeeds(
        facts=ModelFacts(
            root=model.name,
            context=context,
            family=spec.model_type,
            num_parameters=num_parameters(priced),
            weights_bytes=weights,
            weights_format=priced.main_format.name,
        ),
        config=replace(config, kv_cache_memory_bytes=kv) if kv else config,  # an encoder has none
        kv_bytes=kv + config.kv_ram_tier_bytes,
        step_bytes=step,
        process_bytes=process,
    )


def facts_of(engine: EngineClient) -> ModelFacts:
    """What is known of a loaded model.

    Raises:
        EngineUnavailableError: it is not loaded.
    """
    summary = engine.summary
    return ModelFacts(
        root=engine.model_name,
        context=engine.config.max_model_len,
        family=engine.spec.model_type,
        num_parameters=summary.num_parameters,
        weights_bytes=summary.weights_bytes,
        weights_format=summary.weights_format,
        line=summary.line,
    )


def _priced(config: EngineConfig, model: ModelDescription) -> PricedModel:
    definition = model.definition
    dtype = definition.dtype if config.dtype == "auto" else config.dtype
    kv = config.kv_cache_dtype
    return PricedModel(
        spec=definition.spec,
        ops=lower(definition.spec),
        activations=float_format(dtype),
        weights=on_load_format(config.quantization),
        weight_formats=declared_formats(definition),
        kv=None if kv == "auto" else number_format(kv),
    )
