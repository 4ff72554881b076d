"""`CPUExecutor`: our C++ kernels behind the plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache as once
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array
from ridgeline.core.cache_groups import cache_groups
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.ops import Attend, FeatureOp, MoE, Op, SendHidden, StageOp
from ridgeline.core.plan import Admission, ModelRole, Segment
from ridgeline.core.result import SegmentResult
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.base import PoolExecutor
from ridgeline.executors.cpu.adapters import NativeAdapters
from ridgeline.executors.cpu.adjust import adjust
from ridgeline.executors.cpu.batch import CPUBatch, build_batch, num_kept_rows
from ridgeline.executors.cpu.feature_ops import logits_by_depth, run_feature_op
from ridgeline.executors.cpu.kv_cache import KVCache, check_block_tokens
from ridgeline.executors.cpu.kv_selection import choose, ends_prompts
from ridgeline.executors.cpu.native_ops import fallback_ops
from ridgeline.executors.cpu.packed_cache import PACKING_VERSION, PackedCache
from ridgeline.executors.cpu.program import Program
from ridgeline.executors.cpu.ropes import depends_on_length, tables_by_length
from ridgeline.executors.cpu.spans import SpanLog
from ridgeline.executors.cpu.state import CPUSequence
from ridgeline.executors.cpu.streaming import stream_weights
from ridgeline.executors.cpu.weights import PackedWeights, pack_weights, with_borrowed
from ridgeline.executors.features import PassFeatures, on_whole_vocabulary
from ridgeline.executors.handle import Handle, Mask
from ridgeline.executors.kv_reuse import take_over
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.outputs import DrawnRow, SegmentContext, SegmentRows, draw_tokens
from ridgeline.executors.pipeline import AwaitedPass
from ridgeline.executors.runner import Clock, MaskOf
from ridgeline.executors.state import SequenceState
from ridgeline.kernels.cpu.library import ABI_VERSION, chosen_level
from ridgeline.kernels.cpu.pool import shared_pool
from ridgeline.kernels.cpu.structs import RlBuffer
from ridgeline.weights import Adapter

if TYPE_CHECKING:
    from ridgeline.executors.cpu.fallback_ops import FallbackOps

Floats = npt.NDArray[np.float32]

_HEAD_ROWS = 64  # of prompt log-probabilities at once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    spec: ModelSpec
    ops: tuple[Op, ...]
    weights: PackedWeights
    program: Program
    fallback: "FallbackOps | None"
    adapters: NativeAdapters
    token_ids: Array | None
    is_head: bool
    later: tuple[Program, ...]

    def adapters_of(self, batch: CPUBatch) -> Any:
        return self.adapters.of_batch([state.admission.adapter for state in batch.states])


class CPUExecutor(PoolExecutor[KVCache]):
    """See `ridgeline.core.protocols.Executor` for the contract.

    Args:
        kv_cache_dtype: float32, float16, bfloat16, int8, fp8, int4, or auto for the weights' own.
        packed_cache: where packed weights are kept for the next start; ``None`` for nowhere.
        weights_memory_bytes: of the target's packed weights; those beyond are read from that
            cache's file in every step.
        level: instruction-set level; ``None`` for the best one of this machine.

    Raises:
        SettingsError: a setting is not possible here.
        NativeLibraryError: the kernels are not built.
    """

    name = "cpu"

    def __init__(
        self,
        models: Mapping[ModelRole, ExecutorModel],
        block_tokens: int,
        *,
        kv_cache_dtype: str = "auto",
        packed_cache: PackedCache | None = None,
        weights_memory_bytes: int | None = None,
        level: str | None = None,
    ) -> None:
        check_block_tokens(block_tokens)  # before minutes of packing
        super().__init__(
            self.name,
            {role: model.spec for role, model in models.items()},
            kernels=f"{level or chosen_level()}/{ABI_VERSION}/{PACKING_VERSION}",
            pipe=models[ModelRole.TARGET].pipe,
            shares=any(model.shares_kv for model in models.values()),
        )
        groups = (model.group for model in models.values() if model.group is not None)
        self._group = next(groups, None)
        self._pool = self._group.pool if self._group is not None else shared_pool(level)
        self._models: dict[ModelRole, _Model] = {}
        for role, model in models.items():
            self._models[role] = self._load(role, model, packed_cache, weights_memory_bytes)
            if model.shares_kv:
                self.pools[role] = self.pools[ModelRole.TARGET]
                continue
            dtype = model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
            shares = model.group is not None and model.context_ranks > 1
            part = (model.group.rank, model.context_ranks) if model.group and shares else (0, 1)
            self.pools[role] = KVCache(self._pool, model.spec, dtype, block_tokens, part)
        self._num_groups = {role: len(cache_groups(self.spec(role))) for role in self.pools}
        self._logits = np.empty(0, dtype=np.float32)
        self._spans: SpanLog | None = None  # of the pass that runs, while steps are recorded

    def _load(
        self,
        role: ModelRole,
        model: ExecutorModel,
        packed_cache: PackedCache | None,
        memory_bytes: int | None,
    ) -> "_Model":
        """Pack a model's weights, but for those that it has of the target, and lower its ops."""
        fallbacks = fallback_ops(model.all_ops)
        if fallbacks and memory_bytes is not None:
            raise SettingsError(
                f"weights_memory_bytes is for models whose ops all have kernels; those of "
                f"{model.spec.model_type} do not."
            )
        whole = replace(model, ops=model.all_ops)
        if model.is_exit:
            weights = self._models[ModelRole.TARGET].weights
        elif packed_cache is None or fallbacks:
            weights = pack_weights(self._pool, whole, fallbacks=fallbacks)
        else:
            weights = packed_cache.pack(self._pool, whole)
        if model.borrowed is not None:
            weights = with_borrowed(weights, self._models[ModelRole.TARGET].weights, model)
        program, *later = (
            Program(self._pool, model.spec, each, weights, fallbacks, model.group)
            for each in (model.ops, *model.later)
        )
        if memory_bytes is not None and role is ModelRole.TARGET:
            native = [model.ops[place] for place in program.native]
            program.stream(stream_weights(model.spec, weights, native, memory_bytes))
        return _Model(
            spec=model.spec,
            ops=model.ops,
            weights=weights,
            program=program,
            fallback=_fallback_ops(program, weights, model.adapters) if fallbacks else None,
            adapters=NativeAdapters(self._pool, model.adapters, program.slots),
            token_ids=model.token_ids,
            is_head=model.is_head,
            later=tuple(later),
        )

    def weights_bytes(self, role: ModelRole = ModelRole.TARGET) -> int:
        """Bytes of the packed weights."""
        return self._models[role].weights.num_bytes

    def bits_per_weight(self, role: ModelRole = ModelRole.TARGET) -> float:
        """Of all matrices that multiply something: layers and head, scales included."""
        model = self._models[role]
        return model.weights.bits_per_weight(model.ops)

    def weight_formats(self, role: ModelRole = ModelRole.TARGET) -> Mapping[str, NumberFormat]:
        return self._models[role].weights.formats()

    def expert_tokens(self) -> Mapping[str, Array]:
        found, model = dict[str, Array](), self._models[ModelRole.TARGET]
        for op in (op for op in model.ops if isinstance(op, MoE)):
            if model.fallback is None or op.router.name not in model.fallback.expert_tokens:
                found[op.router.name] = model.program.expert_tokens(op)
            else:
                found[op.router.name] = model.fallback.expert_tokens[op.router.name].copy()
        return found

    def free(self) -> None:
        for model in self._models.values():
            for program in (model.program, *model.later):
                program.close()
        for cache in self.pools.values():
            cache.close()
        self._models.clear()

    def new_state(self, admission: Admission) -> SequenceState:
        return CPUSequence(admission, self._num_groups, shares=self.shares)

    def forward(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        handle: Handle,
        masks: Sequence[MaskOf],
        clock: Clock,
    ) -> tuple[SegmentResult, ...] | AwaitedPass:
        batch, logits_NV = self._run_batch(segments, role, clock)
        model = self._models[role]
        if logits_NV is None:
            assert self.awaited is not None
            return self.awaited.add(batch.items, role)
        handle.wait_for_masks()
        set_masks = [mask() for mask in masks]
        drawn = self.draw_tokens(batch, logits_NV, set_masks)
        rows_of = self._rows_of(model, batch, logits_NV)
        results = self.results(batch.items, role, set_masks, drawn, rows_of)
        self._note_pass(role)
        clock.lap("sample_s")
        return tuple(results)

    def _run_batch(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock
    ) -> tuple[CPUBatch, Floats | None]:
        """A pass as far as logits, unless it goes on in the next stage of a pipeline."""
        states, model = cast(Mapping[int, CPUSequence], self.states), self._models[role]
        batch = self._batch(segments, states, role)
        if role is ModelRole.TARGET:
            take_over(batch.items, model.ops, self.pools[role].reuse)
        model.program.reserve(batch.num_rows)
        clock.lap("prepare_s")
        goes_on = self.awaited is not None and role is ModelRole.TARGET
        with self._recorded():
            if model.later:
                programs, vocab_size = (model.program, *model.later), model.spec.vocab_size
                models = [replace(model, program=program) for program in programs]
                logits_NV: Floats | None = logits_by_depth(
                    programs, batch, vocab_size, lambda n: self._run_program(models[n], batch)
                )
            else:
                self._run_program(model, batch)
                logits_NV = None if goes_on else self._logits_of(model, batch)
        self._note_experts(role, model)
        clock.lap("forward_s")
        return batch, logits_NV

    def draft_logits(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock
    ) -> list[tuple[SegmentContext, Array]]:
        batch, logits_NV = self._run_batch(segments, role, clock)
        assert logits_NV is not None, "a draft model is whole in every stage"
        self._note_pass(role)
        stops = [0, *accumulate(num_kept_rows(each.segment) for each in batch.items)]
        return [
            (item, logits_NV[first:last])
            for item, (first, last) in zip(batch.items, pairwise(stops), strict=True)
        ]

    def replay(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        num_steps: int,
        handle: Handle,
        clock: Clock,
    ) -> list[tuple[SegmentResult, ...]] | None:
        states = cast(Mapping[int, CPUSequence], self.states)
        model = self._models[role]
        if not self._can_replay(segments, states, model):
            return None
        batch = self._batch(segments, states, role)
        if role is ModelRole.TARGET:
            take_over(batch.items, model.ops, self.pools[role].reuse)
        model.program.reserve(batch.num_rows)
        draws = np.concatenate([state.sampling for state in batch.states])
        draws["position"] = batch.positions + 1
        struct, adapters = batch.struct(), model.adapters_of(batch)
        clock.lap("prepare_s")
        with self._recorded():
            tokens_NS = model.program.decode(
                struct, self.pools[role].structs, adapters, draws, num_steps, handle.abort_flag
            )
        self._note_experts(role, model)
        clock.lap("forward_s")
        steps = self.replayed(segments, role, tokens_NS.tolist())
        self._note_pass(role)
        clock.lap("sample_s")
        return steps

    def _batch(
        self, segments: Sequence[Segment], states: Mapping[int, CPUSequence], role: ModelRole
    ) -> CPUBatch:
        model = self._models[role]
        return build_batch(
            segments, states, role, self.pools[role],
            state_inputs=model.program.state_inputs, is_head=model.is_head,
        )  # fmt: skip

    @staticmethod
    def _can_replay(
        segments: Sequence[Segment], states: Mapping[int, CPUSequence], model: _Model
    ) -> bool:
        """Whether nothing is needed between the steps but what native code does."""
        return (
            all(segment.num_tokens == 1 for segment in segments)
            and all(states[segment.slot].is_plain for segment in segments)
            and not any(states[segment.slot].verifies_by_rejection for segment in segments)
            and not any(depends_on_length(spec) for spec in model.program.ropes)
            and not model.program.caller_ops
            and not model.program.is_streamed
        )

    def recording_changes(self, on: bool) -> None:
        self._pool.record(on)
        self._spans = SpanLog(pool=self._pool) if on else None

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Holds the pool's lock, and takes what is recorded meanwhile, if anything is."""
        with self._pool.lock:
            if self._pool.is_recording:
                self._pool.take_spans()  # of others that share the pool
            yield
            if self._spans is not None:
                self._spans.take()

    def _note_pass(self, role: ModelRole) -> None:
        if self.recorder is not None and self._spans is not None:
            log, model = self._spans, self._models[role]
            self.recorder.add(role, lambda: log.passes(model.ops, model.program.native))
            self._spans = SpanLog(pool=self._pool)

    def _note_experts(self, role: ModelRole, model: _Model) -> None:
        if role is ModelRole.TARGET:
            read = model.program.take_experts_read()
            if model.fallback is not None:
                read += model.fallback.take_experts_read()
            self.experts_read = (self.experts_read or 0) + read

    def _run_program(self, model: _Model, batch: CPUBatch) -> None:
        struct = batch.struct()
        features = PassFeatures(batch.items, batch.role)

        def run_op(op: Op) -> None:
            if isinstance(op, StageOp):
                self._pass_on(op, model, batch)
            elif isinstance(op, FeatureOp):
                run_feature_op(op, features, model.program, batch.num_tokens)
            elif isinstance(op, Attend):
                choose(op, model.program, model.weights, batch, self.pools[batch.role])
            else:
                assert model.fallback is not None
                model.fallback.run(op, batch)

        tables, addresses = tables_by_length(model.program.ropes, batch)
        model.program.run(
            struct,
            self.pools[batch.role].structs,
            addresses,
            model.adapters_of(batch),
            run_op if self._spans is None else self._spans.timed(run_op),
            model.program.attends if ends_prompts(batch) else (),
        )
        del tables
        features.store()

    def _pass_on(self, op: StageOp, model: _Model, batch: CPUBatch) -> None:
        """Hidden states to the next stage of the pipeline, or from the one before."""
        assert self._pipe is not None
        rows_TD = model.program.rows(RlBuffer.X, batch.num_tokens)
        if isinstance(op, SendHidden):
            self._pipe.send(rows_TD)
        else:
            rows_TD[...] = self._pipe.receive(rows_TD.shape, "float32")

    def _logits_of(self, model: _Model, batch: CPUBatch) -> Floats:
        """Logits ``[N, V]``; overwritten by the next pass."""
        count, vocab = len(batch.logit_rows), model.spec.vocab_size
        logits = self._logits
        if logits.size < count * vocab:
            logits = np.empty(count * vocab, dtype=np.float32)
            if not any(item.segment.outputs.logits for item in batch.items):
                self._logits = logits
        logits_NV = logits[: count * vocab].reshape(count, vocab)
        if count:
            assert model.spec.has_head, "an encoder's outputs are hidden states"
            self._head(model, batch.logit_rows, logits_NV)
        return logits_NV

    @staticmethod
    def _head(model: _Model, rows: npt.NDArray[np.int32], logits_NV: Floats) -> None:
        if (token_ids := model.token_ids) is None:
            model.program.head(rows, logits_NV)
            return
        logits_NR = np.empty((len(rows), len(token_ids)), dtype=np.float32)
        model.program.head(rows, logits_NR)
        logits_NV[...] = on_whole_vocabulary(logits_NR, token_ids, logits_NV.shape[1])

    def _prompt_logits(self, model: _Model, first: int, last: int) -> Iterator[Array]:
        """Logits ``[V]`` of each of some rows of the batch, computed a few rows at a time."""
        for start in range(first, last, _HEAD_ROWS):
            rows = np.arange(start, min(start + _HEAD_ROWS, last), dtype=np.int32)
            logits_NV = np.empty((len(rows), model.spec.vocab_size), dtype=np.float32)
            with self._recorded():
                model.program.head(rows, logits_NV)
            yield from logits_NV

    def _rows_of(
        self, model: _Model, batch: CPUBatch, logits_NV: Floats
    ) -> Callable[[int], SegmentRows]:
        @once  # most steps want drawn tokens alone
        def stops() -> tuple[list[int], list[int]]:
            segments = [item.segment for item in batch.items]
            kept, rows = map(num_kept_rows, segments), (each.num_tokens for each in segments)
            return [0, *accumulate(kept)], [0, *accumulate(rows)]

        def rows_of(number: int) -> SegmentRows:
            kept, rows = stops()
            first, last = rows[number : number + 2]
            logits = logits_NV[kept[number] : kept[number + 1]]
            prompt_logits = self._prompt_logits(model, first, last)
            return SegmentRows(logits, _hidden(model, first, last), prompt_logits)

        return rows_of

    def draw_tokens(
        self, batch: CPUBatch, logits_NV: Floats, masks: Sequence[Mask | None]
    ) -> list[list[int] | None]:
        """For each segment the tokens of its sampled rows; see `outputs.draw_tokens`."""
        vocab = logits_NV.shape[1]

        def draw(rows: Sequence[DrawnRow], words: Sequence[Mask | None]) -> list[int]:
            masked = {
                place: np.ascontiguousarray(mask)
                for place, mask in enumerate(words)
                if mask is not None
            }
            adjusted = {
                place: _adjusted(
                    batch.items[row.number], state, batch.role, row.node, logits_NV[row.logit_row]
                )
                for place, row in enumerate(rows)
                if (state := batch.states[row.number]).is_adjusted
            }
            logit_rows = np.array([row.logit_row for row in rows], dtype=np.uint64)
            table = np.concatenate([batch.states[row.number].sampling for row in rows])
            table["logits"] = logits_NV.ctypes.data + 4 * vocab * logit_rows
            table["position"] = [row.position for row in rows]
            for place, mask in masked.items():
                table["mask"][place] = mask.ctypes.data
            for place, logits_V in adjusted.items():
                table["logits"][place] = logits_V.ctypes.data
            tokens = np.empty(len(table), dtype=np.int32)
            with self._recorded():
                self._pool.library.rl_sample(
                    self._pool.handle, table.ctypes.data, len(table), vocab, tokens.ctypes.data
                )
            return tokens.tolist()

        return draw_tokens(batch.items, batch.role, masks, num_kept_rows, draw)

    def move_kv(
        self, role: ModelRole, state: SequenceState, sources: Sequence[int], first: int
    ) -> None:
        cache = self.pools[role]
        for group in range(len(cache.groups)):
            table = cast(CPUSequence, state).native_table(role, group)
            cache.move_slots(group, table, sources, first, self._group)


def _fallback_ops(
    program: Program, weights: PackedWeights, adapters: Sequence[Adapter]
) -> "FallbackOps":
    from ridgeline.executors.cpu.fallback_ops import FallbackOps  # imports torch

    return FallbackOps(program, weights.kept, adapters)


def _adjusted(
    item: SegmentContext, state: CPUSequence, role: ModelRole, node: int, logits_V: Floats
) -> Floats:
    """Logits of the row after draft ``node`` (−1: the last known token), with penalties."""
    params = state.admission.params
    if not params.has_penalties:
        return adjust(logits_V, params, None)
    history = state.counted(role, item.segment.stop - item.segment.num_drafts)
    num_known = len(history)
    history.extend(item.path(node))
    row = adjust(logits_V, params, history)
    history.forget(num_known)
    return row


def _hidden(model: _Model, first: int, last: int) -> Callable[[], Array]:
    return lambda: model.program.rows(RlBuffer.H, last)[first:, : model.spec.hidden_size]
