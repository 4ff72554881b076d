"""`DistributedExecutor`: one model on several processes."""

import hashlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from msgspec.structs import replace as renumbered

from ridgeline.core.arrays import Array
from ridgeline.core.cache_groups import kv_groups, state_group
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, RidgelineError, SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.host import usable_cores
from ridgeline.core.ops import ContextOp, GatherOp, Op, SendHidden
from ridgeline.core.parallel_layout import Link, ParallelLayout
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import Executor, KVLayout
from ridgeline.core.result import StepResult
from ridgeline.core.settings.parallel import WITHOUT_RAY
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.distributed.links import SIZES, link_of
from ridgeline.executors.distributed.machines import check_machines, threads_of
from ridgeline.executors.distributed.messages import (
    AbortStep,
    Allocate,
    Begin,
    Done,
    Export,
    Import,
    Loaded,
    Masks,
    Ran,
    Report,
    RunPlan,
)
from ridgeline.executors.distributed.ranks import Ranks, Silence
from ridgeline.executors.distributed.serving import is_masked
from ridgeline.executors.distributed.stages import layout_of, layout_of_draft
from ridgeline.executors.distributed.workers import Workers
from ridgeline.executors.handle import Handle, Mask
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import shard


class DistributedExecutor(Executor):
    """See `ridgeline.core.protocols.Executor` for the contract.

    Every rank runs every plan with its part of the weights and of the KV cache. Those of the last
    stage sample the same tokens, of which those before hear from them; the driver says nothing
    between plans. What they exchange among each other stands in their lists of ops. When a rank is
    lost, all steps fail and all ranks are ended.

    Args:
        models: their weights are read by the ranks, each its part.
        config: of which the ranks get all but the number of ranks.
        executor: name of what each rank runs plans with.

    Raises:
        SettingsError: a model cannot be split, or too much for this machine.
        RidgelineError: what a rank raised as it loaded its part, or workers that did not come.
    """

    def __init__(
        self,
        models: Mapping[ModelRole, ExecutorModel],
        config: EngineConfig,
        executor: str,
        *,
        silence: Silence | None = None,
    ) -> None:
        self._name = executor
        self._specs = {role: model.spec for role, model in models.items()}
        layout = layout_of(models[ModelRole.TARGET], config, executor)
        check_machines(config)
        self.layout = layout
        for role, spec in self._specs.items():
            shard(spec, self.layout_for(role), 0)  # refused before a process starts, if it is
        self._block_tokens = config.block_tokens
        self._steps: dict[int, _Step] = {}
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._loaded: dict[int, Loaded] = {}
        self._all_loaded: Future[None] = Future()
        self._lock = threading.Lock()
        self._failure: RidgelineError | None = None
        own = replace(
            config,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            expert_parallel_size=1,
            context_parallel_size=1,
            split_feed_forward=False,
            workers=0,
            executor=executor,
            **WITHOUT_RAY,
        )
        num_threads = threads_of(usable_cores(), layout, config.workers + 1)
        workers = Workers(config) if config.workers else None
        if workers is not None:
            workers.gather()
        self._ranks = Ranks(
            [
                Begin(config=own, layout=layout, rank=rank, num_threads=num_threads)
                for rank in range(layout.num_ranks)
            ],
            self._on_report,
            self._on_lost,
            silence,
            workers,
        )
        try:
            self._all_loaded.result()
            self._check_formats()
        except BaseException:
            self._ranks.close()
            raise

    @property
    def name(self) -> str:
        """What each rank runs plans with."""
        return self._name

    @property
    def kernels(self) -> str:
        return self._loaded[0].kernels

    @property
    def max_in_flight(self) -> int:
        return self.layout.pipeline + 1

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    @property
    def rank_pids(self) -> list[int]:
        """The processes of those ranks that are on this machine, in their order."""
        return self._ranks.pids

    @property
    def cpu_s(self) -> float:
        """Processor time of all ranks until about now, in seconds."""
        return sum(life.cpu_s for life in self._ranks.lives())

    @property
    def link(self) -> Link:
        """What exchanges took when the ranks were started."""
        peers = max(2, self.layout.stage_ranks)  # two stages, if one rank has each
        return link_of(self._loaded[0].link_s, SIZES, peers)

    def exchanges(self, role: ModelRole = ModelRole.TARGET) -> tuple[Op, ...]:
        """What is exchanged in a pass of a model, in order, as the first rank of each stage has
        it."""
        layout = self.layout_for(role)
        return tuple(
            op
            for rank in range(0, layout.num_ranks, layout.stage_ranks)
            for op in shard(self._specs[role], layout, rank).ops
            if isinstance(op, GatherOp | ContextOp | SendHidden)
        )

    def layout_for(self, role: ModelRole = ModelRole.TARGET) -> ParallelLayout:
        """How a model is spread (`stages.layout_of_draft` of a draft model)."""
        return self.layout if role is ModelRole.TARGET else layout_of_draft(self.layout)

    def busy_s(self) -> list[float]:
        """Seconds that each rank has computed steps, until half a second ago."""
        return [life.busy_s for life in self._ranks.lives()]

    def exchanged(self) -> list[tuple[int, int]]:
        """Bytes that each rank has sent to others, and its exchanges, until half a second ago."""
        return [(life.sent_bytes, life.num_exchanges) for life in self._ranks.lives()]

    def expert_tokens(self) -> Mapping[str, Array]:
        """Of all stages, until half a second ago. Ranks that share contexts count other tokens,
        some of them twice: nothing is said of theirs."""
        if self.layout.context > 1:
            return {}
        return {
            router: counts
            for life in self._ranks.lives()
            for router, counts in life.expert_tokens.items()
        }

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return self._specs[role]

    def weight_formats(self, role: ModelRole = ModelRole.TARGET) -> Mapping[str, NumberFormat]:
        return {
            name: form
            for loaded in self._loaded.values()
            for name, form in loaded.roles[role].formats.items()
        }

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        """Blocks as all ranks together store them: one rank's part after the other, or all of a
        block on one of the ranks that share contexts."""
        parts = [self._loaded[rank].roles[role] for rank in sorted(self._loaded)]
        context_ranks = self.layout_for(role).context
        if context_ranks > 1:
            del parts[1:]  # all have blocks of one kind
        digests = "/".join(part.digest for part in parts)
        return KVLayout(
            block_tokens=self._block_tokens,
            groups=kv_groups(self._specs[role]),
            block_bytes=tuple(map(sum, zip(*(part.block_bytes for part in parts), strict=True))),
            states=state_group(self._specs[role]),
            digest=hashlib.sha256(f"ranks/{digests}".encode()).hexdigest(),
            context_ranks=context_ranks,
        )

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        self._call([Allocate(number=-1, role=role, num_blocks=list(num_blocks))] * self.num_ranks)

    def submit(self, plan: StepPlan) -> "_Step":
        with self._lock:
            if self._failure is not None:
                raise EngineError(str(self._failure))
            step = self._steps[plan.step_id] = _Step(plan, self._ranks)
        self._ranks.send(RunPlan(plan=plan))
        return step

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        command = Export(number=-1, role=role, group=group, blocks=list(blocks))
        parts = self._call([command] * self.num_ranks)
        sizes = self._part_bytes(role, group)
        return b"".join(
            part[index * size : (index + 1) * size]
            for index in range(len(blocks))
            for part, size in zip(parts, sizes, strict=True)
        )

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        sizes = self._part_bytes(role, group)
        whole = sum(sizes)
        if len(data) != whole * len(blocks):
            raise ValueError(f"{len(data)} bytes are not {len(blocks)} blocks of group {group}")
        commands, first = [], 0
        for size in sizes:
            part = b"".join(data[start : start + size] for start in range(first, len(data), whole))
            commands.append(
                Import(number=-1, role=role, group=group, blocks=list(blocks), data=part)
            )
            first += size
        self._call(commands)

    def close(self) -> None:
        self._on_lost(EngineError("The executor is closed."))
        self._ranks.close()

    def _part_bytes(self, role: ModelRole, group: int) -> list[int]:
        """What each rank has of a block."""
        return [self._loaded[rank].roles[role].block_bytes[group] for rank in sorted(self._loaded)]

    def _check_formats(self) -> None:
        """Ranks choose what they hold quantized weights in by what is in their part."""
        for role in self._specs:
            found = self.weight_formats(role)
            for loaded in self._loaded.values():
                formats = loaded.roles[role].formats
                for name in (name for name, form in formats.items() if found[name] != form):
                    raise SettingsError(
                        f"The codes of {name} are of one kind in the part of one rank and of "
                        "another kind in that of another, which would not give the tokens of one "
                        "process. Leave tensor_parallel_size and expert_parallel_size out."
                    )

    def _call(self, commands: Sequence[Allocate | Export | Import]) -> list[bytes]:
        """Have each rank carry out a command; what each sent back."""
        number = next(self._numbers)
        call = _Call(self.num_ranks)
        with self._lock:
            if self._failure is not None:
                raise EngineError(str(self._failure))
            self._calls[number] = call
        self._ranks.send_each([renumbered(each, number=number) for each in commands])
        return call.parts.result()

    def _on_report(self, rank: int, report: Report) -> None:
        with self._lock:
            match report:
                case Loaded():
                    self._loaded[rank] = report
                    if len(self._loaded) == self.num_ranks:
                        self._all_loaded.set_result(None)
                case Done(number=number, data=data):
                    if self._calls[number].take(rank, data):
                        del self._calls[number]
                case Ran(step_id=step_id) if step_id in self._steps:
                    done = self._steps[step_id].take(report, self.layout)
                    if done:
                        del self._steps[step_id]
                case _:
                    return

    def _on_lost(self, error: RidgelineError) -> None:
        with self._lock:
            self._failure = self._failure or error
            steps, calls = list(self._steps.values()), list(self._calls.values())
            self._steps.clear()
            self._calls.clear()
        if not self._all_loaded.done():
            self._all_loaded.set_exception(error)
        for step in steps:
            step.fail(error)
        for call in calls:
            call.parts.set_exception(error)


class _Step(Handle):
    """A step that ranks run: done when all of them have, and agree on its tokens."""

    def __init__(self, plan: StepPlan, ranks: Ranks) -> None:
        super().__init__(plan)
        self._ranks = ranks
        self._is_masked = is_masked(plan)
        self._ran: list[Ran] = []

    def set_masks(self, masks: Mapping[tuple[int, int], Mask]) -> None:
        super().set_masks(masks)
        if self.masks_complete.is_set():
            segments = list(self.masks)
            self._ranks.send(
                Masks(
                    step_id=self.plan.step_id,
                    segments=segments,
                    masks=[self.masks[place] for place in segments],
                )
            )

    def abort(self) -> None:
        """A step that waits for masks fails. Others run to their end: ranks could not agree on the
        token after which a replay ends."""
        if self._is_masked and not self.masks_complete.is_set():
            self._ranks.send(AbortStep(step_id=self.plan.step_id))
        super().abort()

    def take(self, ran: Ran, layout: ParallelLayout) -> bool:
        """Whether all ranks of the last stage have run it."""
        self._ran.append(ran)
        if len(self._ran) < layout.stage_ranks:
            return False
        if len({each.checksum for each in self._ran}) > 1:
            self.fail(EngineError("The ranks do not agree on the tokens of a step."))
            return True
        result: StepResult = next(each.result for each in self._ran if each.result is not None)
        if layout.pipeline > 1 or layout.context > 1:  # the others have not said what theirs were
            result = replace(result, experts_read=None)
        self.future.set_result(result)
        return True

    def fail(self, error: RidgelineError) -> None:
        """There will be no result."""
        self.masks_complete.set()
        self.future.set_exception(EngineError(str(error)))


class _Call:
    """A command that all ranks carry out; ``parts`` are what each sent back, in their order."""

    def __init__(self, num_ranks: int) -> None:
        self._parts: list[bytes | None] = [None] * num_ranks
        self.parts: Future[list[bytes]] = Future()

    def take(self, rank: int, data: bytes) -> bool:
        """Whether it was the last."""
        self._parts[rank] = data
        found = [part for part in self._parts if part is not None]
        if len(found) < len(self._parts):
            return False
        self.parts.set_result(found)
        return True
