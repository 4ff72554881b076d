"""A model as an executor takes it: spec, ops and weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.core.ops import Op
from ridgeline.core.spec import ModelSpec
from ridgeline.weights import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorModel:
    """``weights`` are keyed by canonical name and all have the type ``dtype``.

    ``adapters[i]`` is what sequences of adapter slot i + 1 run with; slot 0 is the plain model.
    """

    spec: ModelSpec
    ops: tuple[Op, ...]
    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    adapters: tuple[Adapter, ...] = ()
