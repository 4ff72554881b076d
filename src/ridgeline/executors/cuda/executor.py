"""`CUDAExecutor`: the plan on a GPU.

A *deferrable* step wants tokens and nothing else. It is issued as soon as it is submitted, whether
or not the step before it is done: tokens that it needs of that step are on the device, and stay
there. Its own are copied to pinned memory behind it, and a second thread waits for the copy. A step
that needs the host between the forward pass and its tokens (masks, drafts to verify,
log-probabilities) waits for the step before, and is run as on the other executors.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from ridgeline.core.arrays import Array
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.plan import Admission, ModelRole, Pass, Segment, StepPlan, referenced_output
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.rounding import ceil_div
from ridgeline.executors.base import PoolExecutor
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.batch import HostBatch, build_batch, note_known
from ridgeline.executors.cuda.deferrable import can_decode, draw_of, is_deferrable
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.event_log import EventLog
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.kv_cache import DeviceKVCache, kv_dtype
from ridgeline.executors.cuda.launched import DrawnTokens, LaunchedStep
from ridgeline.executors.cuda.memory import kv_budget_bytes
from ridgeline.executors.cuda.model import EXECUTIONS, DeviceModel
from ridgeline.executors.cuda.on_device import OnDevice
from ridgeline.executors.cuda.row_sampling import draw_tokens
from ridgeline.executors.cuda.staging import Staging
from ridgeline.executors.cuda.tuning import Tuning
from ridgeline.executors.cuda.tuning_cache import Tuned
from ridgeline.executors.cuda.warming import fitting, tune, warm_up
from ridgeline.executors.handle import Handle
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.outputs import SegmentContext, SegmentRows, num_logit_rows
from ridgeline.executors.runner import Clock, MaskOf
from ridgeline.executors.state import SequenceState
from ridgeline.kernels import reference
from ridgeline.kernels.tensors import as_array, torch_dtype
from ridgeline.kernels.triton import LinearKey, kernel_problem

Result = TypeVar("Result")

_MOST_TOKENS = 512  # of a step, until `kv_budget_bytes` is told


class CUDAExecutor(PoolExecutor[DeviceKVCache]):
    """See `ridgeline.core.protocols.Executor` for the contract.

    Args:
        kv_cache_dtype: float32, float16, bfloat16, int8, fp8, or auto for the weights' own.
        num_slots: sequences that run at once.
        memory_share: how much of the device's memory this process may take.
        execution: how decode steps run: graphs, compile (by PyTorch), or eager.
        attention: what attention may be run by, beside the kernels.
        tuning: how tiles of products are found as the pools are allocated, on a GPU; guesses
            without it.
        warm_up: compile and record what every load needs once the KV pools are there, rather than
            when a request waits for it.

    Raises:
        SettingsError: a setting is not possible here.
        OutOfMemoryError: the weights do not fit; says what helps.
    """

    name = "cuda"

    def __init__(
        self,
        models: Mapping[ModelRole, ExecutorModel],
        block_tokens: int,
        *,
        device: Device,
        kernels: Kernels,
        kv_cache_dtype: str = "auto",
        num_slots: int = 64,
        memory_share: float = 0.9,
        execution: str = "graphs",
        attention: AttentionBackends | None = None,
        tuning: Tuning | None = None,
        warm_up: bool = False,
    ) -> None:
        super().__init__(
            self.name,
            {role: model.spec for role, model in models.items()},
            kernels=f"{kernels.name}/{device.name}/{torch.__version__}",
        )
        if execution not in EXECUTIONS:
            raise SettingsError(f"execution must be one of {', '.join(EXECUTIONS)}.")
        self.device, self._kernels = device, kernels
        self._num_slots, self._memory_share = num_slots, memory_share
        self._warms_up, self._tuning = warm_up, tuning
        self._most_tokens = _MOST_TOKENS
        self._staging = Staging(device)
        self._models: dict[ModelRole, DeviceModel] = {}
        attention = attention or AttentionBackends()
        kv_dtypes = {
            role: kv_dtype(kv_cache_dtype, torch_dtype(each.dtype)) for role, each in models.items()
        }
        for role, model in models.items():
            attention.check(model.ops, kv_dtypes[role], block_tokens)
        with device.scope(), torch.inference_mode():
            for role, model in models.items():
                self._models[role] = DeviceModel(
                    device,
                    kernels,
                    role,
                    model,
                    kv_dtypes[role],
                    block_tokens=block_tokens,
                    memory_share=memory_share,
                    execution=execution,
                    attention=attention,
                )
                self.pools[role] = self._models[role].cache
        self._opened: OnDevice | None = None
        self._drawn = DrawnTokens(tokens=())
        self._last: Future[StepResult] | None = None
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cuda-finisher")

    def weights_bytes(self, role: ModelRole = ModelRole.TARGET) -> int:
        """Bytes of the weights on the device."""
        return self._models[role].weights.num_bytes

    def weight_formats(self, role: ModelRole = ModelRole.TARGET) -> Mapping[str, NumberFormat]:
        return self._models[role].weights.formats

    def tuned_products(self, role: ModelRole = ModelRole.TARGET) -> Mapping[LinearKey, Tuned]:
        """The configurations of products that were timed, on this start or another."""
        return self._models[role].tuned

    def num_recorded(self, role: ModelRole = ModelRole.TARGET) -> int:
        """How many variants of the decode step have been recorded."""
        return self._models[role].steps.num_recorded

    def kv_budget_bytes(self, max_num_batched_tokens: int) -> int:
        """What the device has for KV beside weights, and the activations of such steps."""
        self._most_tokens = max_num_batched_tokens
        return kv_budget_bytes(
            self.device.memory(),
            [(model.spec, model.ops, model.dtype) for model in self._models.values()],
            memory_share=self._memory_share,
            num_tokens=max_num_batched_tokens,
            num_rows=self._num_slots,
        )

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        with self.device.scope(), torch.inference_mode():
            super().allocate_kv(num_blocks, role)
            with fitting(self.device):
                self._choose_attention(role)
        waits = self._warms_up or self._tuning is not None
        if waits and all(cache.num_blocks for cache in self.pools.values()):
            self.in_turn(self._warm_up)

    def _choose_attention(self, role: ModelRole) -> None:
        model = self._models[role]
        model.choose_attention(
            num_slots=self._num_slots, longest=max(self._longest(each) for each in self.pools)
        )
        if model.attention.taken:  # KV of other kernels is another
            self._kernels_name += f"/{role} attention by {model.attention.taken}"

    def _warm_up(self) -> None:
        self._on_device()
        with fitting(self.device):
            if self._tuning is not None:
                tune(self.device, self._models.values(), self._tuning)
            if self._warms_up:
                warm_up(
                    self.device,
                    self._models.values(),
                    self._staging.send,
                    kernels=self._kernels,
                    most_tokens=self._most_tokens,
                )

    def submit(self, plan: StepPlan) -> Handle:
        handle = self.new_handle(plan)
        before = self._last
        launched = self.thread.submit(self._launch, handle, before)
        self._last = self._finisher.submit(lambda: _outcome(launched.result()))
        handle.future = self._last
        return handle

    def in_turn(self, call: Callable[[], Result]) -> Result:
        def scoped() -> Result:
            with self.device.scope(), torch.inference_mode():
                return call()

        return super().in_turn(scoped)

    def free(self) -> None:
        self._finisher.shutdown()
        self.device.synchronize()
        for model in self._models.values():
            model.close()
        self._models.clear()
        self._opened, self._last = None, None
        for cache in self.pools.values():
            cache.free()
        self.device.release()

    def new_state(self, admission: Admission) -> SequenceState:
        self._on_device().admit(admission)
        return SequenceState(admission)

    def _launch(
        self, handle: Handle, before: Future[StepResult] | None
    ) -> LaunchedStep | StepResult:
        """Issue a deferrable step, or run another to its end."""
        try:
            with self.device.scope(), torch.inference_mode():
                clock = Clock()
                self.begin(handle.plan)
                if self._is_plain(handle.plan):
                    return self._issue(handle)
                if before is not None:
                    before.result()
                assert self._drawn.tokens is not None
                result, tokens = self.run_passes(handle, (self._drawn.tokens,), clock)
                self.end(handle.plan)
                self._drawn = DrawnTokens(tokens=tokens)
                return result
        except EngineError:
            raise
        except torch.OutOfMemoryError as error:
            memory = self.device.memory()
            raise EngineError(
                f"A step of {handle.plan.num_tokens} tokens did not fit into the memory of "
                f"{self.device.name} ({memory.free / 1e9:.2f} of {memory.total / 1e9:.2f} GB "
                "free); lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs."
            ) from error
        except Exception as error:
            problem = kernel_problem(error, self.device.name)
            raise EngineError(
                f"A step failed: {problem or f'{type(error).__name__}: {error}'}"
            ) from error

    def _issue(self, handle: Handle) -> LaunchedStep:
        began = perf_counter()
        (a_pass,) = handle.plan.passes
        segments = a_pass.segments
        states = tuple(self.states[segment.slot] for segment in segments)
        self._update(segments, a_pass.role)
        before, self._drawn = self._drawn, DrawnTokens()

        def source(token: int) -> int:
            if token >= 0:
                return token
            return before.source(referenced_output(token), self._on_device().log.never)

        started = self.device.record(timed=True)
        waited_s = 0.0
        if self._decodes(a_pass):
            rows: list[int | None] = [*range(len(segments))]
            num_rows, num_steps = self._issue_decode(
                segments, a_pass.role, source, a_pass.num_steps, handle
            )
            waited_s = self._models[a_pass.role].steps.waited_s
        else:
            num_steps = 1
            batch = build_batch(segments, self.states, source, with_lengths=self._asks(a_pass.role))
            rows, num_rows = self._issue_batch(batch, segments, a_pass.role)
        self._drawn.places = [
            place + step * num_rows if step < num_steps else -1
            for place in rows
            if place is not None
            for step in range(a_pass.num_steps)
        ]
        arrived = self._on_device().fetch(num_rows * num_steps)
        return LaunchedStep(
            handle=handle,
            role=a_pass.role,
            segments=segments,
            states=states,
            rows=tuple(rows),
            num_rows=num_rows,
            num_steps=num_steps,
            arrived=arrived,
            drawn=self._drawn,
            started=started,
            finished=self.device.record(timed=True),
            prepare_s=perf_counter() - began - waited_s,
        )

    def _issue_decode(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        source: Callable[[int], int],
        num_steps: int,
        handle: Handle,
    ) -> tuple[int, int]:
        """Issue decode steps; how many rows each of them has, and how many they are."""
        steps, adjustments = self._models[role].steps, self._on_device().adjustments
        sources = [source(segment.token_ids[0]) for segment in segments]
        drawn = self._to_adjust(segments, sources, role)
        adjusts = adjustments.begin(drawn)
        variant = steps.variant(
            len(segments),
            max(segment.stop for segment in segments) + num_steps - 1,
            how=max(draw_of(self.states[segment.slot]) for segment in segments),
            adjusts=adjusts,
        )
        done = steps.run(
            variant,
            np.array(sources),
            np.array([segment.start for segment in segments]),
            np.array([segment.slot for segment in segments]),
            num_steps=num_steps,
            is_aborted=handle.aborted.is_set,
        )
        if adjusts:
            adjustments.end(drawn, done)
        return variant.rows, done

    def _issue_batch(
        self, batch: HostBatch, segments: Sequence[Segment], role: ModelRole
    ) -> tuple[list[int | None], int]:
        """Issue a pass op by op; each segment's row among the tokens drawn, and their number."""
        send, model = self._staging.send, self._models[role]
        slots, log = self._on_device().slots, self._on_device().log
        hidden_TD, tokens = model.hidden(batch, send)
        sampled = [number for number in batch.order if segments[number].outputs.sample]
        rows: list[int | None] = [None] * len(segments)
        for row, number in enumerate(sampled):
            rows[number] = row
        if sampled:
            wanted = [segments[number] for number in sampled]
            at = send(batch.logit_rows)
            adjustments = self._on_device().adjustments
            states = self._to_adjust(wanted, batch.sources[batch.logit_rows].tolist(), role)
            adjusts = adjustments.begin(states)
            inputs = tokens.picked(at)
            drawn = model.draw(
                hidden_TD.index_select(0, at),
                inputs,
                how=max(draw_of(self.states[segment.slot]) for segment in wanted),
                adjusts=adjusts,
            )
            if adjusts:
                adjustments.end(states, 1)
            void = inputs.slots_T == slots.padding
            log.values[: len(sampled)].copy_(torch.where(void, -1, drawn))
        return rows, len(sampled)

    def _to_adjust(
        self, segments: Sequence[Segment], sources: Sequence[int], role: ModelRole
    ) -> list[tuple[SequenceState, int]]:
        """Of a deferrable step's sequences those whose logits may be adjusted, and the positions of
        the tokens that are drawn; what refers to a token that was not drawn is void."""
        never = self._on_device().log.never
        return [
            (self.states[segment.slot], segment.stop)
            for segment, source in zip(segments, sources, strict=True)
            if role is ModelRole.TARGET and source != never
        ]

    def forward(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        handle: Handle,
        masks: Sequence[MaskOf],
        clock: Clock,
    ) -> tuple[SegmentResult, ...]:
        send = self._staging.send
        batch, hidden_TD, logits_NV = self._run_batch(segments, role, clock)
        handle.wait_for_masks()
        items = [self._context(segments[number], role) for number in batch.order]
        set_masks = [masks[number]() for number in batch.order]
        drawn = draw_tokens(
            self._kernels, self._on_device().slots, items, logits_NV, set_masks, role, send
        )
        stops = [0, *accumulate(num_logit_rows(item.segment) for item in items)]

        def rows_of(number: int) -> SegmentRows:
            rows_NV = logits_NV[stops[number] : stops[number + 1]]
            last = batch.spans[number].last
            hidden_1D = hidden_TD[last - 1 : last]  # other rows are for models that it does not run
            if drawn[number] is None or not _wants_tokens_only(items[number]):
                logits = as_array(rows_NV)
            else:  # nobody reads them
                logits = np.broadcast_to(np.float32(0), tuple(rows_NV.shape))
            return SegmentRows(logits, lambda: as_array(hidden_1D))

        ordered = self.results(items, role, set_masks, drawn, rows_of)
        clock.lap("sample_s")
        by_number = dict(zip(batch.order, ordered, strict=True))
        return tuple(by_number[number] for number in range(len(segments)))

    def _run_batch(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock
    ) -> tuple[HostBatch, torch.Tensor, torch.Tensor]:
        """A pass op by op: the batch, hidden states of all rows, and logits of those wanted."""
        self._update(segments, role)
        send, model = self._staging.send, self._models[role]
        batch = build_batch(segments, self.states, int, with_lengths=self._asks(role))
        clock.lap("prepare_s")
        spans = None if self.recorder is None else EventLog(self.device)
        hidden_TD, _ = model.hidden(batch, send, spans)
        logits_NV = hidden_TD[:0]
        if len(batch.logit_rows):
            rows = hidden_TD.index_select(0, send(batch.logit_rows))
            logits_NV = reference.wide(model.logits(rows))
        if self.recorder is not None and spans is not None:
            if len(batch.logit_rows):
                spans.note((len(model.ops) - 1,))
            self.recorder.add(role, lambda: spans.passes(model.ops))
        clock.lap("forward_s")
        return batch, hidden_TD, logits_NV

    def draft_logits(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock
    ) -> list[tuple[SegmentContext, Array]]:
        batch, _, logits_NV = self._run_batch(segments, role, clock)
        found: list[tuple[SegmentContext, Array]] = []
        first = 0
        for number in batch.order:
            last = first + num_logit_rows(segments[number])
            item = self._context(segments[number], role)
            found.append((item, as_array(logits_NV[first:last])))
            first = last
        by_number = dict(zip(batch.order, found, strict=True))
        return [by_number[number] for number in range(len(segments))]

    def replay(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        num_steps: int,
        handle: Handle,
        clock: Clock,
    ) -> list[tuple[SegmentResult, ...]] | None:
        a_pass = Pass(segments=tuple(segments), role=role, num_steps=num_steps)
        plan = StepPlan(step_id=0, passes=(a_pass,))
        if self.recorder is not None or not self._decodes(a_pass) or not self._is_plain(plan):
            return None
        self._update(segments, role)
        clock.lap("prepare_s")
        num_rows, done = self._issue_decode(segments, role, int, num_steps, handle)
        arrived = self._on_device().fetch(num_rows * done)
        self.device.record().wait()
        clock.lap("forward_s")
        tokens_NS = arrived.view(done, num_rows)[:, : len(segments)].tolist()
        steps = self.replayed(segments, role, tokens_NS)
        clock.lap("sample_s")
        return steps

    def _is_plain(self, plan: StepPlan) -> bool:
        if self.recorder is not None:  # ops are timed one by one
            return False
        fits = self._on_device().adjustments.fits
        return is_deferrable(plan, self.states, decodes=self._decodes, fits=fits)

    def _decodes(self, a_pass: Pass) -> bool:
        """Whether a pass is run as a decode step."""
        return (
            can_decode(a_pass.segments, a_pass.num_steps)
            and not self._asks(a_pass.role)
            and not any(self.states[s.slot].admission.adapter for s in a_pass.segments)
        )

    def _asks(self, role: ModelRole) -> bool:
        """Whether a model's rotary tables depend on the lengths of sequences."""
        return self._models[role].rope.needs_lengths

    def _update(self, segments: Sequence[Segment], role: ModelRole) -> None:
        """Note what segments bring: block tables and tokens."""
        tables = self._on_device().slots
        for segment in segments:
            for update in segment.block_updates:
                self.states[segment.slot].update_table(role, update)
                tables.update_table(role, segment.slot, update)
        note_known(segments, self.states, role)
        tables.flush()

    def _context(self, segment: Segment, role: ModelRole) -> SegmentContext:
        state = self.states[segment.slot]
        return SegmentContext(segment=segment, state=state, known=state.known(role))

    def move_kv(
        self, role: ModelRole, state: SequenceState, sources: Sequence[int], first: int
    ) -> None:
        cache = self.pools[role]
        targets = range(first, first + len(sources))
        for index, group in enumerate(cache.groups):
            table, size = state.table(role, index), cache.block_tokens
            flat = [
                [table[slot // size] * size + slot % size for slot in slots]
                for slots in (sources, targets)
            ]
            from_slots, to_slots = (self._staging.send(np.array(each)) for each in flat)
            layers = [cache.layer(layer) for layer in group.layers]
            self._kernels.move_slots(layers, from_slots, to_slots)

    def _on_device(self) -> OnDevice:
        """Made once the KV pools are there."""
        if self._opened is None:
            pools = {role: cache.num_blocks for role, cache in self.pools.items()}
            self._opened = OnDevice(
                self.device,
                self._staging,
                pools,
                num_slots=self._num_slots,
                longest=max(self._longest(role) for role in pools),
                vocab=self.spec(ModelRole.TARGET).vocab_size,
            )
            for model in self._models.values():
                model.open(self._staging, self._opened)
        return self._opened

    def _longest(self, role: ModelRole) -> int:
        """Blocks of the longest sequence that a model can have."""
        cache = self.pools[role]
        return ceil_div(self.spec(role).max_position, cache.block_tokens)


def _outcome(launched: LaunchedStep | StepResult) -> StepResult:
    return launched.wait() if isinstance(launched, LaunchedStep) else launched


def _wants_tokens_only(item: SegmentContext) -> bool:
    """Whether nothing of a segment's result is computed from logits but its tokens."""
    outputs = item.segment.outputs
    told = item.state.admission.params.logprobs is not None or outputs.candidates > 0
    return not (told or outputs.drawn or outputs.logits or outputs.prompt_logprobs)
