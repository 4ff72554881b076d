"""Whole steps of a model on the executor: decode at some contexts, and prompts."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, cast

import torch

from benchmarks.gpu.progress import Bench
from benchmarks.gpu.settings import Settings
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.formats import number_format
from ridgeline.core.ops import Op
from ridgeline.core.plan import ModelRole, Segment, step_in_flight
from ridgeline.core.plan_maker import GREEDY, PlanMaker
from ridgeline.core.result import StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.executor import CUDAExecutor
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.tuning import Tuning
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.models import describe, lower
from ridgeline.roofline import BatchShape, PricedModel, Work, decode_batch, pass_work, prefill_batch
from ridgeline.weights import WeightSource
from ridgeline.weights.dummy import dummy_moments

_BLOCK = 16
_REPLAY = 8  # steps of a plan
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A decode step or a whole prompt: seconds by the device's clock, and those that pass while one
    step follows the other; ``work`` is what has to move and be computed for ``rows``, without
    sampling. ``sampled`` steps draw by top-p, the others take the best token."""

    shape: str
    format: str
    phase: str
    batch: int
    tokens: int
    seconds: float
    wall_seconds: float
    model: PricedModel
    rows: BatchShape
    work: Work
    sampled: bool = False

    @property
    def name(self) -> str:
        what = f"{self.batch} at {self.tokens}" if self.phase == "decode" else f"{self.tokens}"
        what += ", top-p" if self.sampled else ""
        return f"{self.shape} {self.format}, {self.phase} {what}"

    @property
    def tokens_per_s(self) -> float:
        done = self.batch if self.phase == "decode" else self.tokens
        return done / self.wall_seconds


def random_model(device: Device, config: object, *, seed: int = 0) -> ExecutorModel:
    """A model of a shape, with random weights that are made on the device."""
    spec = describe(config).spec  # type: ignore[arg-type]
    model_ops = lower(spec)
    weights = cast(WeightSource, _OnDevice(model_ops, device.torch_device, seed))
    return ExecutorModel(spec=spec, ops=model_ops, weights=weights, dtype="bfloat16")


class _OnDevice:
    """Random bfloat16 weights as `DummyWeights` has them, but made on the device."""

    def __init__(self, model_ops: Sequence[Op], device: torch.device, seed: int) -> None:
        self._ops, self._device, self._seed = model_ops, device, seed

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator(self._device).manual_seed(self._seed)
        settings: dict[str, Any] = {"dtype": torch.bfloat16, "device": self._device}
        for name, shape, mean, std in dummy_moments(self._ops):
            yield name, torch.empty(shape, **settings).normal_(mean, std, generator=generator)


class StepBench:
    """An executor with a model, and plans made by hand. `close` it.

    Raises:
        OutOfMemoryError: the weights do not fit.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        name: str,
        model: ExecutorModel,
        form: str,
        *,
        max_batch: int,
        settings: Settings,
        execution: str = "graphs",
        attention: AttentionBackends | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self._name, self._format, self._settings = name, form, settings
        if form != "bfloat16":
            model = replace(model, quantization=number_format(form))
        self.executor = CUDAExecutor(
            {ModelRole.TARGET: model},
            _BLOCK,
            device=device,
            kernels=kernels,
            num_slots=max_batch,
            execution=execution,
            attention=attention,
            tuning=tuning,
        )
        self._priced = priced_model(model, self.executor.name, held=self.executor.weight_formats())
        self._live: tuple[int, ...] = ()
        layout = self.executor.kv_layout()
        self._block_bytes = sum(layout.block_bytes)
        self._num_groups = len(layout.groups)
        self._plans = PlanMaker(self._num_groups)
        room = self.executor.kv_budget_bytes(8192)
        self.num_blocks = room // self._block_bytes
        if self.num_blocks < 1:
            self.close()
            raise OutOfMemoryError("There is no memory left for KV.")

    def open(self, num_blocks: int) -> None:
        """Allocate KV for the cases, of random values."""
        self.executor.allocate_kv([num_blocks] * self._num_groups)
        self.executor.in_turn(self.executor.pools[ModelRole.TARGET].fill_random)

    def blocks_of(self, batch: int, tokens: int) -> int:
        """KV blocks that a case needs."""
        return batch * ceil((tokens + _REPLAY + 1) / _BLOCK)

    def decode(
        self,
        batch: int,
        context: int,
        *,
        replay: int = _REPLAY,
        ahead: bool = True,
        sampled: bool = False,
    ) -> StepTime:
        """Steps of one token of each sequence, after ``context`` tokens.

        ``replay`` steps are one plan; with ``ahead`` the next is submitted while one runs.
        """
        params = _SAMPLED if sampled else GREEDY
        runner = _Decode(self, batch, context, replay=replay, ahead=ahead, params=params)
        _, step_s = runner.run(num_plans=2)  # by which graphs are recorded, and kernels compiled
        num_plans = max(1, ceil(self._settings.steps_s / (replay * step_s)))
        found = [runner.run(num_plans) for _ in range(self._settings.repeats)]
        rows = decode_batch(batch, context + 1)
        return self._time("decode", batch, context, found, rows, sampled=sampled)

    def prefill(self, tokens: int) -> StepTime:
        """A prompt from the start to its first output."""
        prompt = tuple(index % self._priced.spec.vocab_size for index in range(tokens))
        found = []
        for _ in range(2 + self._settings.repeats // 2):
            segment = self.segment(0, 0, prompt, blocks=range(self.blocks_of(1, tokens)))
            began = time.perf_counter()
            result = self.submit([segment], admissions=[(0, prompt)])()
            found.append((result.timings.forward_s, time.perf_counter() - began))
        return self._time("prefill", 1, tokens, found[1:], prefill_batch(tokens))

    def segment(
        self, slot: int, start: int, tokens: Sequence[int], *, blocks: range | None = None
    ) -> Segment:
        return self._plans.segment(slot, start, tokens, blocks=blocks)

    def submit(
        self,
        segments: Sequence[Segment],
        *,
        admissions: Sequence[tuple[int, tuple[int, ...]]] = (),
        num_steps: int = 1,
        params: SamplingParams = GREEDY,
    ) -> Callable[[], StepResult]:
        """Submit a plan; those who are admitted take the places of all that ran before."""
        releases = self._live if admissions else ()
        if admissions:
            self._live = tuple(slot for slot, _ in admissions)
        plan = self._plans.plan(
            segments,
            num_steps=num_steps,
            admissions=[self._plans.admission(*each, params) for each in admissions],
            releases=releases,
        )
        return self.executor.submit(plan).result

    def close(self) -> None:
        self.executor.close()

    def _time(
        self,
        phase: str,
        batch: int,
        tokens: int,
        found: Sequence[tuple[float, float]],
        rows: BatchShape,
        *,
        sampled: bool = False,
    ) -> StepTime:
        return StepTime(
            shape=self._name,
            format=self._format,
            phase=phase,
            batch=batch,
            tokens=tokens,
            seconds=statistics.median(seconds for seconds, _ in found),
            wall_seconds=statistics.median(wall for _, wall in found),
            model=self._priced,
            rows=rows,
            work=pass_work(self._priced, rows),
            sampled=sampled,
        )


class _Decode:
    """A batch whose every measurement starts from its context."""

    def __init__(
        self,
        bench: StepBench,
        batch: int,
        context: int,
        *,
        replay: int,
        ahead: bool,
        params: SamplingParams,
    ) -> None:
        self._bench, self._batch, self._context = bench, batch, context
        self._replay, self._ahead, self._params = replay, ahead, params
        self._tokens = (7,) * (context + 1)
        self._each = bench.blocks_of(batch, context) // batch

    def run(self, num_plans: int) -> tuple[float, float]:
        """Seconds of a step, by the device's clock and of those that pass: of ``num_plans`` plans
        behind one that is done, so that the first's way to the device does not count."""
        self._start()()  # tables and settings are on their way, and the graph is recorded
        results = self._results(num_plans + 1)
        next(results)
        began = time.perf_counter()
        seconds = sum(result.timings.forward_s for result in results)
        steps = num_plans * self._replay
        return seconds / steps, (time.perf_counter() - began) / steps

    def _results(self, num_plans: int) -> Iterator[StepResult]:
        """Of plans that follow each other. Each has the positions behind the context, so that all
        are alike, and the tokens of the one before."""
        last = range(self._replay - 1, self._batch * self._replay, self._replay)
        wait = self._submit(self._tokens[-1:] * self._batch)
        for _ in range(num_plans - 1):
            if self._ahead:
                behind = self._submit([step_in_flight(output) for output in last])
                yield wait()
                wait = behind
            else:
                result = wait()
                yield result
                wait = self._submit([part.token_ids[-1] for part in result.passes[0]])
        yield wait()

    def _submit(self, tokens: Sequence[int]) -> Callable[[], StepResult]:
        segments = [
            self._bench.segment(slot, self._context, [token]) for slot, token in enumerate(tokens)
        ]
        return self._bench.submit(segments, num_steps=self._replay)

    def _start(self) -> Callable[[], StepResult]:
        """Admit the batch with its context, whose KV is random, and run one plan of it."""
        segments = [
            self._bench.segment(
                slot,
                self._context,
                self._tokens[-1:],
                blocks=range(slot * self._each, (slot + 1) * self._each),
            )
            for slot in range(self._batch)
        ]
        return self._bench.submit(
            segments,
            admissions=[(slot, self._tokens) for slot in range(self._batch)],
            num_steps=self._replay,
            params=self._params,
        )


def bench_steps(bench: Bench, shape: str, form: str, most: int | None) -> None:
    """Decode steps and prompts of one model, those whose KV has room; ``most`` decode steps."""
    settings, progress = bench.settings, bench.progress
    own = StepBench(
        bench.device,
        bench.kernels(),
        shape,
        random_model(bench.device, settings.shapes[shape]),
        form,
        max_batch=max(batch for batch, _ in (*settings.decode, *settings.sampled)),
        settings=settings,
        attention=bench.attention,
        tuning=bench.tuning and replace(bench.tuning, most_s=0.0),  # what is known
    )

    def case(name: str, time: Callable[[], StepTime]) -> None:
        if progress.allows(f"{shape} {form}: {name}"):
            progress.result("step", time())

    try:
        fitting = [
            (batch, context, sampled)
            for cases, sampled in ((settings.decode[:most], False), (settings.sampled, True))
            for batch, context in cases
            if own.blocks_of(batch, context) <= own.num_blocks
        ]
        for batch, context in settings.decode[:most]:
            if (batch, context, False) not in fitting:
                name = f"{shape} {form}: decode {batch} at {context}"
                progress.leave_out(name, "no memory for KV")
        wanted = [own.blocks_of(1, prompt) for prompt in settings.prompts]
        wanted += [own.blocks_of(batch, context) for batch, context, _ in fitting]
        own.open(min(own.num_blocks, max(wanted)))
        progress.result("computed by", (f"{shape} {form}", own.executor.kernels))
        for batch, context, sampled in fitting:
            case(
                f"decode {batch} at {context}" + (", top-p" if sampled else ""),
                partial(own.decode, batch, context, sampled=sampled),
            )
        for prompt in settings.prompts:
            case(f"prompt of {prompt}", partial(own.prefill, prompt))
    finally:
        own.close()
