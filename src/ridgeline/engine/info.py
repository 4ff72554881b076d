"""What callers of an engine may know of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.config import ResolvedConfig
from ridgeline.core.pooling import PoolingSpec
from ridgeline.core.spec import ModelSpec
from ridgeline.scheduler.prediction import (
    DEFAULT_CURVE,
    DEFAULT_PREDICTOR,
    LinearPredictor,
    StepCurve,
)
from ridgeline.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """``line`` is for whoever loaded the model. ``weights_format`` is that of most weights.
    ``linear`` is what steps take, as far as that is linear; ``curve`` by their tokens."""

    line: str
    weights_format: str
    weights_bytes: int
    num_parameters: int
    linear: LinearPredictor = DEFAULT_PREDICTOR
    curve: StepCurve = DEFAULT_CURVE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """A loaded model and the resolved configuration that runs it.

    ``kv_digest`` names what KV depends on beside prompt, adapter slot and salt: the layout, and
    with a disk tier also weights, adapters and what computes with them (`kv_tiers.kv_digest`).
    ``eos_token_ids`` end a completion. ``adapters`` are the names of LoRA adapters, slot by slot
    from 1. ``sources`` are the names and folders of all models and adapters that are in use.
    ``pooling`` says what the model makes of hidden states, if not text.
    """

    name: str
    spec: ModelSpec
    config: ResolvedConfig
    kv_digest: str
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    summary: LoadSummary
    adapters: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    pooling: PoolingSpec = field(default_factory=PoolingSpec)
