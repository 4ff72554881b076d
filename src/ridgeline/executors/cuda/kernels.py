"""The ops that a program is made of, and which implementation runs them.

Shapes: T tokens, D hidden size, I and O a matrix's columns and rows, H heads, K KV heads, d head
width, v that of V, E experts, k experts of a token, N rows of logits, V vocabulary, G KV groups, R
slots with that of padding, M entries of a block table, B rows of a decode step, L logged tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from ridgeline.core.spec import Activation, ClampedSwiGLU, NormSpec, RoutingSpec
from ridgeline.executors.cuda.inputs import PassInput, RopeRows
from ridgeline.executors.cuda.slots import Settings
from ridgeline.kernels.triton import AdjustmentTables, DeviceMatrix, KVTensors, StepRows

AnyActivation = Activation | ClampedSwiGLU


class Draw(IntEnum):
    """How tokens of a batch are drawn: the best, with noise, or of what top-k, top-p and min-p
    leave. Each serves rows of those before it."""

    BEST = 0
    NOISE = 1
    TRUNCATED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A norm with its weight and bias, where it has them."""

    spec: NormSpec
    weight: torch.Tensor | None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendSpec:
    """What attention of one layer is, beside its tensors; ``group`` is that of its KV."""

    group: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Matrices of a mixture of experts: gate above up ``[E, 2F, D]`` and down ``[E, D, F]``."""

    routing: RoutingSpec
    correction_E: torch.Tensor | None
    gate_up: DeviceMatrix
    down: DeviceMatrix
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: AnyActivation


class Kernels(Protocol):
    """An implementation. Results are new tensors; none waits for the device in a decode step."""

    @property
    def name(self) -> str: ...

    @property
    def decides_on_device(self) -> bool:
        """Whether each row's length and temperature are looked at on the device alone: a recorded
        step then serves every context, greedy or not."""

    def reserve(self, matrices: Iterable[DeviceMatrix], dtype: torch.dtype) -> None:
        """Make room for what products with some matrices need, once they are loaded."""

    def begin_step(
        self,
        sources_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        log_L: torch.Tensor,
        tables_GRM: torch.Tensor,
        *,
        block_tokens: int,
    ) -> StepRows:
        """Tokens for sources, and where they belong.

        A source r < 0 refers to element −1 − r of the log; a token that was not drawn is void, and
        becomes token 0 at position 0 of slot R − 1, that of padding. All are int64, tables int32.
        """

    def end_step(
        self,
        sources_B: torch.Tensor,
        positions_B: torch.Tensor,
        number: torch.Tensor,
        rows: StepRows,
        drawn_B: torch.Tensor,
        log_L: torch.Tensor,
        *,
        padding: int,
    ) -> None:
        """Log what step ``number`` (int64 ``[1]``) has drawn, from element number · B on, −1 for
        rows in the slot of padding; sources, positions and the number become the next step's."""

    def linear(
        self,
        x_TI: torch.Tensor,
        matrix: DeviceMatrix,
        *,
        bias_O: torch.Tensor | None = None,
        activation: AnyActivation | None = None,
        residual_TO: torch.Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> torch.Tensor:
        """``residual + scale · act(x Wᵀ + bias)``, all but the product optional.

        With an activation the matrix has the rows of a gate and then of ``up``, and the result
        half their number: act(gate) · up. The residual may be written over with the result.
        """

    def normalise(self, x: torch.Tensor, gain: Gain) -> torch.Tensor:
        """The norm over the last axis."""

    def activate(
        self, up: torch.Tensor, activation: AnyActivation, gate: torch.Tensor | None
    ) -> torch.Tensor:
        """act(gate) · up, or act(up) without a gate."""

    def rotate_and_write(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKv: torch.Tensor | None,
        kv: KVTensors,
        slots_T: torch.Tensor,
        *,
        rope: RopeRows | None,
        starts: tuple[int, int] = (0, 0),
        norms: tuple[Gain, Gain] | None = None,
    ) -> torch.Tensor:
        """Norm and rotate q and k, store k and v in the cache, and return q.

        ``starts`` are the first rotated elements of a head of q and of k.
        """

    def attend(
        self, q_THd: torch.Tensor, kv: KVTensors, at: PassInput, spec: AttendSpec
    ) -> torch.Tensor:
        """``[T, H, v]``: each token over what it sees of its sequence's KV."""

    def experts(self, x_TD: torch.Tensor, logits_TE: torch.Tensor, moe: Experts) -> torch.Tensor:
        """``[T, D]``: each token through the experts that the router's logits choose."""

    def adjust(
        self,
        logits_NV: torch.Tensor,
        tables: AdjustmentTables,
        slots_N: torch.Tensor,
        tokens_N: torch.Tensor,
        stops_N: torch.Tensor,
    ) -> torch.Tensor:
        """Logits in at least float32, with the biases, bars and penalties of each row's slot.

        ``tokens_N`` (int64) are the inputs whose logits these are, at positions ``stops_N`` − 1
        (int32): those that histories lack are added to them first. No two rows have a slot in
        common, but for that of padding.
        """

    def sample(
        self,
        logits_NV: torch.Tensor,
        settings: Settings,
        slots_N: torch.Tensor,
        positions_N: torch.Tensor,
        *,
        masks_NW: torch.Tensor | None = None,
        how: Draw = Draw.TRUNCATED,
    ) -> torch.Tensor:
        """A token for each row by its slot's settings, int64; −1 where none is possible.

        ``masks_NW`` are words of allowed tokens; ``how`` is the most that any row asks for.
        """

    def move_slots(
        self, kv: Sequence[KVTensors], sources: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """Copy tokens from flat slots to others in some layers; all are read before any write."""
