"""A model as an executor takes it: spec, ops and weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.core.ops import Op
from ridgeline.core.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorModel:
    """``weights`` are keyed by canonical name and all have the type ``dtype``."""

    spec: ModelSpec
    ops: tuple[Op, ...]
    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
