"""Configurations of `linear`, found by timing: what they are found for, and which are worth it.

Shapes: T tokens, I inputs, O outputs.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from ridgeline.core.spec import Activation, ClampedSwiGLU
from ridgeline.kernels.triton.launch import next_power_of_2
from ridgeline.kernels.triton.linear import (
    LARGE_BLOCK,
    MOST_SPLITS,
    LinearConfig,
    guess,
    linear,
)
from ridgeline.kernels.triton.packing import DeviceMatrix
from ridgeline.kernels.triton.workspace import Workspace

_TILES = ((32, 2), (64, 4), (64, 8), (128, 4), (128, 8))  # outputs, warps
_STAGES = (3, 4, 5)
_MOST_COLUMNS = 256  # more of them do not fit into registers or shared memory
_COMPARED = 2  # calls at least, where there are as many
_COLD_BYTES = 256 << 20  # of matrices, more than any cache holds
NUM_AXES = 4


class LinearKey(NamedTuple):
    """What a configuration is chosen by: a matrix's layout, the class of batches, and what is
    folded into the product. Names and numbers alone, so that it can be written down."""

    format: str
    group: int
    has_zeros: bool
    rows: int
    columns: int
    tokens: int
    gated: bool
    dtype: str

    @classmethod
    def of(cls, x_TI: torch.Tensor, matrix: DeviceMatrix, *, gated: bool) -> "LinearKey":
        rows, columns = matrix.shape
        return cls(
            format=matrix.format.name.lower(),
            group=matrix.group,
            has_zeros=matrix.zeros is not None,
            rows=rows,
            columns=columns,
            tokens=batch_class(len(x_TI)),
            gated=gated,
            dtype=str(x_TI.dtype).removeprefix("torch."),
        )

    @property
    def name(self) -> str:
        """All of it in one word."""
        words = (self.format, self.group, "zeros" if self.has_zeros else "symmetric")
        shape = f"{self.rows}x{self.columns}"
        form = "gated" if self.gated else "whole"
        return "-".join(map(str, (*words, shape, self.tokens, form, self.dtype)))


def batch_class(num_tokens: int) -> int:
    """The number of tokens that a batch's programs are compiled for, up to `LARGE_BLOCK`."""
    return min(LARGE_BLOCK, max(16, next_power_of_2(num_tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCall:
    """A call of `linear`, but for its inputs."""

    matrix: DeviceMatrix
    bias_O: torch.Tensor | None
    activation: Activation | ClampedSwiGLU | None
    has_residual: bool


@dataclass(slots=True, kw_only=True)
class LinearUse:
    """Calls that share a configuration, those of a model's layers, with ``tokens`` rows of inputs
    of type ``dtype``."""

    tokens: int
    dtype: torch.dtype
    workspace: Workspace
    calls: list[LinearCall] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Of all matrices."""
        return sum(call.matrix.num_bytes for call in self.calls)

    def guess(self) -> LinearConfig:
        """What `linear` would take unless told."""
        matrix, x, out = self.calls[0].matrix, *self._tensors()[:2]
        return guess(matrix, self.tokens, out.shape[1], x)

    def runner(self) -> "LinearRunner":
        """As many of the calls as read their matrices from memory, over random inputs."""
        sizes = accumulate(call.matrix.num_bytes for call in self.calls)
        count = 1 + sum(size < _COLD_BYTES for size in sizes)
        return LinearRunner(self.workspace, self.calls[:count], *self._tensors())

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs, outputs and residuals."""
        call = self.calls[0]
        rows, columns = call.matrix.shape
        width = rows if call.activation is None else rows // 2
        at = call.matrix.codes.device
        x_TI = torch.randn(self.tokens, columns, device=at).to(self.dtype)
        residual_TO = torch.randn(self.tokens, width, device=at).to(self.dtype)
        return x_TI, torch.zeros_like(residual_TO), residual_TO


@dataclass(frozen=True, slots=True)
class LinearRunner:
    """Runs calls once each, with any configuration, into one tensor."""

    workspace: Workspace
    calls: Sequence[LinearCall]
    x_TI: torch.Tensor
    out_TO: torch.Tensor
    residual_TO: torch.Tensor

    def run(self, config: LinearConfig) -> None:
        for call in self.calls:
            self._call(call, config)

    def results(self, config: LinearConfig) -> Iterator[torch.Tensor]:
        """The products of some of the calls, one after the other in the same tensor."""
        for call in self.calls[:: max(1, len(self.calls) // _COMPARED)]:
            self.out_TO.zero_()
            self._call(call, config)
            yield self.out_TO

    def _call(self, call: LinearCall, config: LinearConfig) -> None:
        linear(
            self.x_TI,
            call.matrix,
            self.out_TO,
            workspace=self.workspace,
            bias_O=call.bias_O,
            residual_TO=self.residual_TO if call.has_residual else None,
            activation=call.activation,
            config=config,
        )


class LinearConfigs:
    """The configurations that were found, and a look at which are asked for."""

    def __init__(self) -> None:
        self._found: dict[LinearKey, LinearConfig] = {}
        self._seen: dict[LinearKey, LinearUse] | None = None

    def add(self, key: LinearKey, config: LinearConfig) -> None:
        """Take this one from now on; a step that was recorded keeps its own."""
        self._found[key] = config

    def get(
        self, x_TI: torch.Tensor, call: LinearCall, workspace: Workspace
    ) -> LinearConfig | None:
        """The one for a call; ``None`` leaves it to `linear`'s guess."""
        key = LinearKey.of(x_TI, call.matrix, gated=call.activation is not None)
        if self._seen is not None:
            use = self._seen.setdefault(
                key, LinearUse(tokens=len(x_TI), dtype=x_TI.dtype, workspace=workspace)
            )
            use.calls.append(call)
        return self._found.get(key)

    def found(
        self, x_TI: torch.Tensor, matrix: DeviceMatrix, *, gated: bool
    ) -> LinearConfig | None:
        """The one for such a product, as `get` has it."""
        return self._found.get(LinearKey.of(x_TI, matrix, gated=gated))

    @contextmanager
    def watched(self) -> Iterator[dict[LinearKey, LinearUse]]:
        """The uses of what is called meanwhile."""
        seen: dict[LinearKey, LinearUse] = {}
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None


def neighbours(use: LinearUse, at: LinearConfig, axis: int) -> Sequence[LinearConfig]:
    """What differs from a configuration in one respect of `NUM_AXES`: its tile, how often columns
    are split, how many are read in a step, and how many steps are on their way."""
    matrix = use.calls[0].matrix
    least = max(matrix.unit or matrix.group, 64)
    match axis:
        case 0:  # tiles of more rows have fewer columns, or shared memory would not hold them

            def columns(rows: int) -> int:
                return max(least, min(at.block_k, at.block_k * at.block_o // rows))

            found = [
                replace(at, block_o=rows, block_k=columns(rows), num_warps=warps)
                for rows, warps in _TILES
            ]
        case 1:
            counts = (1, at.splits // 2, 2 * at.splits)
            found = [replace(at, splits=n) for n in counts if 1 <= n <= MOST_SPLITS]
        case 2:
            most = max(least, min(_MOST_COLUMNS, next_power_of_2(matrix.shape[-1])))
            counts = (least, at.block_k // 2, 2 * at.block_k)
            found = [replace(at, block_k=n) for n in counts if least <= n <= most]
        case _:
            found = [replace(at, num_stages=n) for n in _STAGES]
    return [each for each in dict.fromkeys(found) if each != at]


@cache
def kernels_digest() -> str:
    """Names the sources of the kernels, by which they are as fast as they are."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
