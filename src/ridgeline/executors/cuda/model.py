"""One model on the device: weights, KV, program, and its passes.

Shapes: T tokens, S segments, D hidden size, N rows of logits.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ridgeline.core import ops
from ridgeline.core.plan import ModelRole
from ridgeline.core.rounding import ceil_div
from ridgeline.executors.cuda.attention import AttentionBackends, ModelAttention
from ridgeline.executors.cuda.attention_trial import Trial
from ridgeline.executors.cuda.batch import MAX_SHORT, HostBatch, void_batch
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.event_log import EventLog
from ridgeline.executors.cuda.graphs import DecodeSteps, GraphKey
from ridgeline.executors.cuda.inputs import PassInput, SegmentTables, Short, Tree
from ridgeline.executors.cuda.kernels import Draw, Kernels
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.lowering import DeviceAdapter, LowRank
from ridgeline.executors.cuda.on_device import OnDevice
from ridgeline.executors.cuda.program import CallList, rope_specs
from ridgeline.executors.cuda.rope import RopeTables
from ridgeline.executors.cuda.staging import Staging
from ridgeline.executors.cuda.timing import seconds_on
from ridgeline.executors.cuda.triton_kernels import TritonKernels
from ridgeline.executors.cuda.tuning import Tuning, representatives
from ridgeline.executors.cuda.tuning_cache import Tuned
from ridgeline.executors.cuda.weights import load_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels import reference
from ridgeline.kernels.tensors import as_tensor, torch_dtype
from ridgeline.kernels.triton import LinearKey, StepRows, first_of_classes
from ridgeline.weights import Adapter

# How decode steps are run: op by op, compiled by PyTorch and recorded, or recorded.
EXECUTIONS = ("eager", "compile", "graphs")
_MOST_LOGITS = 1 << 25  # that are there at once beside those that memory was left for
_WARM_UP_PROMPTS = (100, 300)  # tokens: weights expanded within a product, and by a library


class DeviceModel:
    """A model that is loaded; `open` completes it once the KV pools are there."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        role: ModelRole,
        model: ExecutorModel,
        cache_dtype: torch.dtype,
        *,
        block_tokens: int,
        memory_share: float,
        execution: str,
        attention: AttentionBackends,
    ) -> None:
        self.role, self.spec, self.ops = role, model.spec, model.ops
        self.dtype = torch_dtype(model.dtype)
        self.weights = load_weights(device, model, memory_share=memory_share)
        kernels.reserve(self.weights.matrices.values(), self.dtype)
        self.cache = DeviceKVCache(device, model.spec, cache_dtype, block_tokens)
        self.rope = RopeTables(rope_specs(model.ops), model.spec.max_position, device.torch_device)
        self.has_adapters = bool(model.adapters)
        self._device, self._kernels, self._execution = device, kernels, execution
        self._is_open = False
        self.tuned: Mapping[LinearKey, Tuned] = {}
        self.attention = ModelAttention(kernels, attention)
        parts = model, self.weights, kernels, self.cache, self.attention
        self._program = CallList(*parts)
        self._adapted = self._program
        if model.adapters:
            adapters = tuple(_on_device(each, device.torch_device) for each in model.adapters)
            self._adapted = CallList(*parts, adapters=adapters)

    def choose_attention(self, *, num_slots: int, longest: int) -> None:
        """Decide what attends, over the pool, which holds nothing yet."""
        self.attention.decide(
            self._device,
            self.cache,
            num_slots=num_slots,
            longest=longest,
            trial=Trial(timer=seconds_on),
        )

    def open(self, staging: Staging, on_device: OnDevice) -> None:
        """Take the tables that are sized by the KV pools."""
        slots, log = on_device.slots, on_device.log
        self._slots, self._log, self._adjustments = slots, log, on_device.adjustments
        body: Any = self._decode
        if self._execution == "compile":
            body = torch.compile(self._decode, dynamic=False)
        self._query_starts = torch.arange(
            slots.num_slots + 1, dtype=torch.int32, device=self._device.torch_device
        )
        self.steps = DecodeSteps(
            self._device,
            staging,
            self._kernels,
            log,
            slots.tables(self.role),
            body,
            block_tokens=self.cache.block_tokens,
            adjusts=self.role is ModelRole.TARGET,
            record=self._execution != "eager",
        )
        self._is_open = True

    def tune(self, tuning: Tuning) -> None:
        """Time the products of decode steps of every class of batches; see `Tuning.run`. Before
        steps are recorded, which keep what they were recorded with."""
        if not isinstance(self._kernels, TritonKernels) or self.rope.needs_lengths:
            return
        configs = self._kernels.linear_configs
        if tuning.most_s == 0:
            self.tuned = tuning.load(self._device, configs)
            return
        sizes = {self._variant(n).rows for n in range(1, self._slots.num_slots + 1)}
        with configs.watched() as uses:
            for rows in representatives(sizes):
                zeros = torch.zeros(rows, dtype=torch.int64, device=self._device.torch_device)
                void = self._begin(torch.full_like(zeros, self._log.never), zeros, zeros)
                self._decode(void, self._variant(rows))
        self.tuned = tuning.run(self._device, configs, uses)

    def _variant(self, num_rows: int) -> GraphKey:
        return self.steps.variant(num_rows, 1, how=Draw.BEST)

    def asks(self, send: Callable[[Any], torch.Tensor], most_tokens: int) -> Callable[[], None]:
        """A call that asks for every kernel that steps of up to ``most_tokens`` tokens may need,
        once; what it computes is not to be used.

        Tokens and places come from here, outside of the call, as they are looked up by PyTorch's
        ops, which run.
        """
        most = min(most_tokens, self.spec.max_position)
        passes = [
            self._inputs(void_batch(num_tokens, self._slots.padding), send)
            for num_tokens in first_of_classes(range(1, most + 1), self._step_class)
        ]
        short = [
            self._short_input(passes[0][0], num_segments, longest)
            for num_segments in range(1, self._slots.num_slots + 1)
            for longest in range(1, MAX_SHORT + 1)
        ]
        programs = dict.fromkeys((self._program, self._adapted))

        def ask() -> None:
            for program in programs:
                for at, rows in passes:
                    hidden_TD = program.hidden(at)
                    if len(hidden_TD) * self.spec.vocab_size <= _MOST_LOGITS:
                        self._ask_for_draws(self.logits(hidden_TD)[:1], rows)
            for at in short:
                self._program.attend_alone(at)

        return ask

    def _ask_for_draws(self, logits_NV: torch.Tensor, rows: StepRows) -> None:
        """Tokens of one row, drawn in every way, as steps that run op by op may ask for them."""
        first = rows.picked(torch.zeros_like(rows.slots_T[:1]))
        tables, settings = self._adjustments.tables, self._slots.settings
        if self.role is ModelRole.TARGET:
            self._kernels.adjust(logits_NV, tables, first.slots_T, first.token_ids_T, first.stops_T)
        wide_NV = reference.wide(logits_NV)
        words = (self.spec.vocab_size + 31) // 32
        masks_NW = torch.zeros(1, words, dtype=torch.int32, device=wide_NV.device)
        for how in (Draw.NOISE, Draw.TRUNCATED):
            for each in (logits_NV, wide_NV):
                self._kernels.sample(each, settings, first.slots_T, first.stops_T, how=how)
        self._kernels.sample(wide_NV, settings, first.slots_T, first.stops_T, masks_NW=masks_NW)

    def _step_class(self, num_tokens: int) -> Hashable:
        """What the kernels of a step with so many tokens are compiled for."""
        assert isinstance(self._kernels, TritonKernels)
        kernels, matrices = self._kernels, self.weights.matrices.values()
        shapes = {(m.format, m.group, m.unit, m.shape): m for m in matrices if len(m.shape) == 2}
        return (
            kernels.product_class(num_tokens, shapes.values(), self.dtype),
            *(
                kernels.experts_class(num_tokens, op.routing.top_k, op.down.shape[0])
                for op in self.ops
                if isinstance(op, ops.MoE)
            ),
        )

    def _short_input(self, like: PassInput, num_segments: int, longest: int) -> PassInput:
        """A pass of segments of few tokens, one of them with ``longest``, for attention alone."""
        num_tokens = num_segments + longest - 1
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self._device.torch_device)
        starts = self._query_starts
        return replace(
            like,
            token_ids_T=zeros,
            query_starts_S1=starts[: num_segments + 1],
            stops_S=starts[:num_segments],
            tables=SegmentTables(like.tables.of_slots, zeros[:num_segments]),
            short=Short(num_segments, num_tokens, longest),
            spans=None,
        )

    def warm_up(self, send: Callable[[Any], torch.Tensor]) -> None:
        """Run what libraries prepare themselves for, and record the decode steps."""
        for num_tokens in _WARM_UP_PROMPTS:
            if num_tokens <= self.spec.max_position:
                self.hidden(void_batch(num_tokens, self._slots.padding), send)
        if not self.rope.needs_lengths:  # or steps are run as prompts are
            self.steps.warm_up()

    def close(self) -> None:
        """Free graphs and weights at once: what refers to itself would wait for the collector."""
        if self._is_open:
            self.steps.close()
        self._program.close()
        self._adapted.close()

    def hidden(
        self,
        batch: HostBatch,
        send: Callable[[Any], torch.Tensor],
        spans: EventLog | None = None,
    ) -> tuple[torch.Tensor, StepRows]:
        """Final hidden states ``[T, D]`` of a pass, op by op, and what its tokens were.

        With ``spans`` an event is recorded after each op.
        """
        at, rows = self._inputs(batch, send)
        adapted = any(span.adapter for span in batch.spans)
        program = self._adapted if adapted else self._program
        if spans is None:
            return program.hidden(at), rows
        spans.begin()
        return program.hidden_recorded(at, spans.note), rows

    def _inputs(
        self, batch: HostBatch, send: Callable[[Any], torch.Tensor]
    ) -> tuple[PassInput, StepRows]:
        """What a pass reads, and what its tokens are."""
        sources_T, kv_positions_T, slots_T, segment_slots = (
            send(each)
            for each in (batch.sources, batch.kv_positions, batch.slots, batch.segment_slots)
        )
        tables_GRM = self._slots.tables(self.role)
        rows = self._begin(sources_T, kv_positions_T, slots_T)
        tree, positions_T = None, rows.positions_T
        if batch.tree is not None:
            counts, ancestors = batch.tree
            positions_T = send(batch.positions)
            tree = Tree(
                num_drafts_S=send(counts),
                ancestors_T=send(ancestors),
                positions_T=positions_T.int(),
            )
        known = None
        if batch.rope_lengths is not None:
            known = batch.positions.tolist(), batch.rope_lengths
        blocks = ceil_div(int(batch.stops.max()), self.cache.block_tokens)
        at = PassInput(
            token_ids_T=rows.token_ids_T,
            positions_T=positions_T,
            query_starts_S1=send(batch.query_starts),
            stops_S=send(batch.stops),
            tables=SegmentTables(tables_GRM[..., :blocks].unbind(), segment_slots),
            slots=rows.kv_slots_GT.unbind(),
            rope=self.rope.of(positions_T, known),
            short=batch.short,
            tree=tree,
            spans=batch.spans,
        )
        return at, rows

    def _begin(
        self, sources_T: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor
    ) -> StepRows:
        return self._kernels.begin_step(
            sources_T,
            positions_T,
            slots_T,
            self._log.values,
            self._slots.tables(self.role),
            block_tokens=self.cache.block_tokens,
        )

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """``[N, V]``, as `CallList.logits` has them."""
        return self._program.logits(hidden_ND)

    def draw(
        self, hidden_ND: torch.Tensor, rows: StepRows, *, how: Draw, adjusts: bool
    ) -> torch.Tensor:
        """The tokens that follow those of some rows, int64 ``[N]``; −1 where none is possible."""
        logits_NV = self.logits(hidden_ND)
        if adjusts:
            tables = self._adjustments.tables
            logits_NV = self._kernels.adjust(
                logits_NV, tables, rows.slots_T, rows.token_ids_T, rows.stops_T
            )
        return self._kernels.sample(
            logits_NV, self._slots.settings, rows.slots_T, rows.stops_T, how=how
        )

    def _decode(self, rows: StepRows, variant: GraphKey) -> torch.Tensor:
        """A whole decode step: the tokens drawn."""
        count = variant.rows
        tables_GRM = self._slots.tables(self.role)
        at = PassInput(
            token_ids_T=rows.token_ids_T,
            positions_T=rows.positions_T,
            query_starts_S1=self._query_starts[: count + 1],
            stops_S=rows.stops_T,
            tables=SegmentTables(tables_GRM[..., : variant.blocks].unbind(), rows.slots_T),
            slots=rows.kv_slots_GT.unbind(),
            rope=self.rope.of(rows.positions_T),
            short=Short(count, count, 1),
        )
        return self.draw(self._program.hidden(at), rows, how=variant.how, adjusts=variant.adjusts)


def _on_device(adapter: Adapter, device: torch.device) -> DeviceAdapter:
    return {
        name: LowRank(as_tensor(each.down).to(device), as_tensor(each.up).to(device))
        for name, each in adapter.items()
    }
