"""A model as a program of native ops."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core import ops
from ridgeline.core.errors import EngineError, OutOfMemoryError
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.cpu.lowering import NativeLowering
from ridgeline.executors.cpu.op_structs import widths
from ridgeline.executors.cpu.streaming import StreamedWeights
from ridgeline.executors.cpu.weights import PackedWeights
from ridgeline.kernels.cpu.group import RankGroup
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlBatch, RlBuffer

_FLOATS = ctypes.POINTER(ctypes.c_float)


class Program:
    """The native ops of a model, without its LM head, which `head` runs on chosen rows.

    ``ropes`` are the rotary tables in their order; those whose frequencies depend on a sequence's
    length come from the caller, step by step. ``slots`` number the products that adapters may
    change, by weight. ``fallbacks`` are ops without a kernel. The caller runs them, those between a
    pipeline's stages and those on features: `caller_ops`, each with the number of native ops before
    it. ``group`` are the ranks that a model's ops exchange with.
    """

    def __init__(
        self,
        pool: Pool,
        spec: ModelSpec,
        model_ops: Sequence[ops.Op],
        weights: PackedWeights,
        fallbacks: Collection[ops.Op] = (),
        group: RankGroup | None = None,
    ) -> None:
        self._pool, self._library = pool, pool.library
        self.hidden_size = spec.hidden_size
        self._widths = widths(spec, model_ops)
        self._handle = self._library.rl_program_new((ctypes.c_int32 * len(RlBuffer))(*self._widths))
        if not self._handle:
            raise OutOfMemoryError("No memory for the program of a model.")
        if group is not None:
            self._library.rl_set_group(self._handle, group.handle)
        lowering = NativeLowering(self._library, self._handle, spec, weights)
        self._kept: tuple[Any, ...] = (lowering, group)  # what the program points to
        self.native: list[int] = []  # the place of each native op among the model's
        self.caller_ops: list[tuple[int, ops.Op]] = []
        self.attends: list[tuple[int, ops.Op]] = []  # each with the number of native ops so far
        for place, op in enumerate(model_ops):
            if op in fallbacks or isinstance(op, ops.StageOp | ops.FeatureOp):
                self.caller_ops.append((lowering.num_ops, op))
            elif not isinstance(op, ops.GatherContext | ops.GatherSplits):  # of the op before
                self.native.append(place)
                lowering.add(op)
            if isinstance(op, ops.Attend):
                self.attends.append((lowering.num_ops, op))
        self.ropes, self.slots, self._routers = lowering.ropes, lowering.slots, lowering.routers
        self._num_ops = lowering.num_ops
        self.state_inputs: int = self._library.rl_state_inputs(self._handle)
        self._reserved = 0
        self._streamed: StreamedWeights | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether weights are read from disk in every step."""
        return self._streamed is not None

    def stream(self, weights: StreamedWeights) -> None:
        """Have weights in memory only while they are used."""
        self._streamed = weights

    def reserve(self, num_tokens: int) -> None:
        """Make room for batches of that many tokens.

        Raises:
            OutOfMemoryError: there is none.
        """
        if num_tokens > self._reserved:
            self._reserved = 0  # what a failure leaves
            if self._library.rl_reserve(self._handle, num_tokens):
                raise OutOfMemoryError(f"No memory for a step of {num_tokens} tokens.")
            self._reserved = num_tokens

    def run(
        self,
        batch: RlBatch,
        groups: Any,
        cos_sin: Any,
        adapters: Any,
        run_op: Callable[[ops.Op], None],
        after: Sequence[tuple[int, ops.Op]] = (),
    ) -> None:
        """All ops over a batch that `reserve` has made room for.

        ``run_op`` gets `caller_ops`, and after they have run those of ``after``, which are
        `attends` or none.
        """

        def run_native(first: int, last: int) -> None:
            failed = self._library.rl_run(
                self._handle, self._pool.handle, first, last, ctypes.byref(batch), groups, cos_sin,
                adapters,
            )  # fmt: skip
            if failed:
                raise EngineError("A step ran out of memory.")

        stops = sorted((*after, *self.caller_ops), key=lambda stop: stop[0])

        def run_between(first: int, last: int, stops: Iterable[tuple[int, ops.Op]]) -> None:
            for stop, op in stops:
                run_native(first, stop)
                run_op(op)
                first = stop
            run_native(first, last)

        if self._streamed is None:
            run_between(0, self._num_ops, stops)
            return
        self._streamed.run(
            lambda first, last: run_between(first, last, (s for s in stops if first < s[0] <= last))
        )

    def head(self, rows: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
        """Logits ``[N, V]`` of some rows of the batch."""
        failed = self._library.rl_head(
            self._handle, self._pool.handle, rows.ctypes.data, len(rows), logits.ctypes.data
        )
        if failed:
            raise EngineError("A step ran out of memory.")

    def decode(
        self,
        batch: RlBatch,
        groups: Any,
        adapters: Any,
        draws: npt.NDArray[np.void],
        num_steps: int,
        abort: ctypes.c_int32,
    ) -> npt.NDArray[np.int32]:
        """Tokens ``[steps done, S]`` of decode steps run without returning; −1 where none is."""
        tokens = np.empty((num_steps, len(draws)), dtype=np.int32)
        done = self._library.rl_decode(
            self._handle, self._pool.handle, ctypes.byref(batch), groups, adapters,
            draws.ctypes.data, num_steps, ctypes.byref(abort), tokens.ctypes.data,
        )  # fmt: skip
        if done < 0:
            raise EngineError("A step ran out of memory.")
        return tokens[:done]

    def take_experts_read(self) -> int:
        """Experts whose weights were read since the last call, summed over layers and steps."""
        return int(self._library.rl_take_experts_read(self._handle))

    def expert_tokens(self, op: ops.MoE) -> npt.NDArray[np.int64]:
        """Tokens that an op that is native has sent to each expert so far."""
        counts = np.zeros(op.router.shape[0], dtype=np.int64)
        self._library.rl_expert_tokens(
            self._handle, self._routers[op.router.name], counts.ctypes.data
        )
        return counts

    def rows(self, buffer: RlBuffer, num_tokens: int) -> npt.NDArray[np.float32]:
        """The first rows of a buffer itself, ``[num_tokens, its width]``."""
        address = self._library.rl_buffer(self._handle, buffer)
        shape = (num_tokens, self._widths[buffer])
        return np.ctypeslib.as_array(ctypes.cast(address, _FLOATS), shape)

    def close(self) -> None:
        if self._streamed is not None:
            self._streamed.close()
        self._library.rl_program_free(self._handle)
        self._kept = ()
