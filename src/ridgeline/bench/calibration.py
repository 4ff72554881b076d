"""Calibrating predictions: steps of models of random weights, measured and fitted.

Three shapes in each number format, at several batches and contexts.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ridgeline
from ridgeline.bench.caches import cache_sizes
from ridgeline.bench.ceilings import measure_ceilings, operation_rates
from ridgeline.bench.conditions import CONTENTION_SHARE, Watch
from ridgeline.bench.kept_rounds import KeptRounds
from ridgeline.bench.native_loops import load_native_loops
from ridgeline.bench.step_timing import StepShape, StepTimer, StepTimes
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import ON_LOAD, on_load_format
from ridgeline.core.host import usable_cores
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors import create_executor, executor_traits
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.models import describe, lower
from ridgeline.planning.simulation import make_loop, run_arrivals
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel, pass_work
from ridgeline.roofline.calibration import Calibration, calibrate
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.features import pass_terms
from ridgeline.roofline.fitting import Sample
from ridgeline.scheduler.prediction import LinearPredictor
from ridgeline.weights import DummyWeights

Progress = Callable[[int, int, str], None]
Config = Mapping[str, object]

_BASE: Config = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def shape(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **changes: object
) -> Config:
    """A Llama-like config."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    return {**_BASE, **sizes, **changes}


# The first has matrices as wide as those of models that are served, and a head that is not small
# beside them, whose format may be another than the layers'. Of the first two no cache holds much,
# even in int4: how much of a few tokens' products hides behind their reading is seen there. The
# third is small: it alone tells what steps, ops and sequences take beside the weights, and is in
# every fit.
SMALL = "small"
SHAPES: Mapping[str, Config] = {
    "wide": shape(2048, 5632, 3, 16, 4, 32768, tie_word_embeddings=True),
    "deep": shape(640, 1792, 28, 10, 10, 4096),
    SMALL: shape(256, 704, 6, 4, 2, 2048),
}
STEPS = (
    *(StepShape(batch_size=b, num_tokens=1, context=c) for b, c in (
        (1, 32), (1, 500), (1, 1500), (2, 200), (3, 300), (4, 32), (4, 800), (5, 100),
        (8, 100), (8, 500), (16, 32), (16, 300),
    )),
    *(StepShape(batch_size=b, num_tokens=n, context=c) for b, n, c in (
        (1, 16, 0), (1, 32, 64), (1, 64, 0), (1, 128, 0), (1, 128, 512), (1, 256, 0),
        (2, 64, 100), (4, 32, 0),
    )),
)  # fmt: skip
_CACHES = 8  # as many times the last cache are beyond it
_LONG_S = 0.5
_ROUNDS = 5
_QUIET_ROUNDS = 2  # so many, and every step was met undisturbed
_HOST_RUNS = 3
QUICK_S = 75.0  # after which no further round begins
_QUICK_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model of random weights, as an executor runs it and as the roofline prices it."""

    name: str
    format: str
    executor: Executor
    priced: PricedModel


def describe_model(config: Config, number_format: str) -> ExecutorModel:
    """Random weights of a config's shapes, not yet made.

    A format that weights are quantized to on load is made from bfloat16.
    """
    spec = describe(config).spec
    ops = lower(spec)
    quantization = on_load_format(number_format) if number_format in ON_LOAD else None
    dtype = "bfloat16" if quantization else number_format
    weights = DummyWeights(ops=ops, dtype=dtype, seed=0)
    return ExecutorModel(
        spec=spec, ops=ops, weights=weights, dtype=dtype, quantization=quantization
    )


def price_of(config: Config, number_format: str, *, executor: str) -> PricedModel:
    """A config's model as the roofline prices it on an executor; no weights are made."""
    return priced_model(describe_model(config, number_format), executor)


def build(
    name: str, config: Config, number_format: str, *, executor: str, block_tokens: int = 16
) -> BenchModel:
    """An executor with random weights of a config's shapes."""
    model = describe_model(config, number_format)
    made = create_executor(
        {ModelRole.TARGET: model},
        EngineConfig(executor=executor, block_tokens=block_tokens, packed_cache_path="off"),
    )
    priced = price_of(config, number_format, executor=made.name)
    return BenchModel(name=name, format=number_format, executor=made, priced=priced)


def measure_in_turns(
    models: Sequence[tuple[BenchModel, Sequence[StepShape]]],
    *,
    rounds: int = _ROUNDS,
    most_rounds: int | None = None,
    between: Callable[[], None] = lambda: None,
    shares: list[float] | None = None,
    kept: KeptRounds | None = None,
    until_s: float = math.inf,
    progress: Progress | None = None,
) -> list[list[StepTimes]]:
    """The seconds of each model's steps, visited in turns so that a step's visits lie far apart.

    ``between`` is called before each round. Rounds during which other processes contended are
    repeated, up to ``most_rounds`` in all (``rounds`` by default); what these took of the
    processors in each is appended to ``shares``. Rounds that are ``kept`` count, and each is kept
    once it is whole. After ``until_s`` on the monotonic clock no further one begins, but for the
    first. The executors are closed at the end.
    """
    timers = [StepTimer(model.executor, steps) for model, steps in models]
    kept = kept or KeptRounds(None, {})
    visits = kept.visits or [[list[tuple[float, ...]]() for _ in steps] for _, steps in models]
    taken = [] if shares is None else shares
    taken += kept.shares
    most = most_rounds or rounds
    while len(taken) < most and num_quiet(taken) < rounds:
        if taken and time.monotonic() >= until_s:
            break
        number, watch = len(taken), Watch()
        between()
        for index, (model, steps) in enumerate(models):
            if progress is not None:
                done = number * len(models) + index
                whole = max(rounds, number + 1) * len(models)
                progress(done, whole, f"measuring {model.name} in {model.format}")
            for step, found in zip(steps, visits[index], strict=True):
                found.append(timers[index].visit(step))
        taken.append(watch.others_share())
        kept.save(visits, taken)
    for model, _ in models:
        model.executor.close()
    return [
        [
            StepTimes(
                shape=model.name, format=model.format, step=step, visits_s=tuple(visits[i][j])
            )
            for j, step in enumerate(steps)
        ]
        for i, (model, steps) in enumerate(models)
    ]


def num_quiet(shares: Sequence[float]) -> int:
    """Rounds in which others took next to nothing."""
    return sum(share <= CONTENTION_SHARE for share in shares)


def short_steps(
    model: PricedModel, ceilings: Ceilings, steps: Sequence[StepShape]
) -> list[StepShape]:
    """Those of the steps whose arithmetic alone takes less than half a second."""
    most = _LONG_S * ceilings.flops_per_s["float32"]
    return [step for step in steps if pass_work(model, step.batch).flops < most]


def samples_of(times: Sequence[StepTimes], model: PricedModel, ceilings: Ceilings) -> list[Sample]:
    """What the fit takes, of measured steps of one model."""
    return [
        Sample(
            terms=pass_terms(model, each.step.batch, ceilings),
            seconds=each.seconds,
            shape=each.shape,
            format=each.format,
            phase=each.step.phase,
        )
        for each in times
    ]


def measure_roof(executor: str) -> Ceilings:
    """The ceilings of what an executor computes with: native loops, or PyTorch."""
    if executor_traits(executor).is_native:
        return measure_ceilings(load_native_loops(), rounds=2).ceilings()
    from ridgeline.bench.torch_ceilings import torch_ceilings

    return torch_ceilings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine gave at one moment: main memory's bytes per second, and operations per
    second by number format (none where they were not measured)."""

    memory: float
    operations: Mapping[str, float]


def rates_now(executor: str) -> Rates:
    """Whether the machine still gives what `measure_roof` found; in about a second."""
    if not executor_traits(executor).is_native:
        from ridgeline.bench.torch_ceilings import torch_ceilings

        return Rates(memory=torch_ceilings((), rounds=1).memory.bytes_per_s, operations={})
    loops, threads = load_native_loops(), usable_cores()
    each = _CACHES * cache_sizes().l3_bytes // threads
    memory = max(
        loops.read_bytes_per_s(pattern, bytes_per_thread=each, threads=threads, seconds=0.1)
        for pattern in range(len(loops.read_patterns))
    )
    best = operation_rates(loops, threads)
    return Rates(memory=memory, operations={name: each.rate for name, each in best.items()})


def with_best(ceilings: Ceilings, rates: Sequence[Rates]) -> Ceilings:
    """With the best rates that were found at any time, as the fastest visit of a step counts."""
    *near, memory = ceilings.levels
    best = replace(memory, bytes_per_s=max(memory.bytes_per_s, *(each.memory for each in rates)))
    flops = {
        name: max(rate, *(each.operations.get(name, 0.0) for each in rates))
        for name, rate in ceilings.flops_per_s.items()
    }
    return replace(ceilings, levels=(*near, best), flops_per_s=flops)


def check_executor(executor: str) -> None:
    """Raises `SettingsError` if there is no such executor, and `InvalidRequestError` if there is
    nothing to calibrate it in."""
    if not executor_traits(executor).calibrated_formats:
        raise InvalidRequestError(
            f"Steps of the {executor} executor are not calibrated yet; name a device of the "
            "catalogue (--hardware), or another --executor."
        )


def calibrate_here(
    executor: str,
    *,
    shapes: Mapping[str, Config] = SHAPES,
    formats: Sequence[str] | None = None,
    steps: Sequence[StepShape] = STEPS,
    quick: bool = False,
    kept_path: Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure the ceilings and the steps, and fit: some minutes, or ``quick``, about 90 s.

    Rounds that others disturb are repeated, to twice as many; if even then fewer than two were
    quiet, the conditions of the ceilings say "contended", and so does whatever is predicted. Quick
    means every other step, and rounds until `QUICK_S` are over; the conditions say that, too.

    Each round is kept in ``kept_path`` until all are there, so that it can be interrupted.

    Raises:
        SettingsError, InvalidRequestError: as `check_executor`.
    """
    until_s = time.monotonic() + QUICK_S if quick else math.inf
    steps = steps[::2] if quick else steps
    check_executor(executor)
    ceilings, rates = measure_roof(executor), list[Rates]()
    host_step_s, host_segment_s = host_seconds()
    models = _built(
        executor, shapes, formats or executor_traits(executor).calibrated_formats, progress
    )
    planned = [(model, short_steps(model.priced, ceilings, steps)) for model in models]
    shares: list[float] = []
    kept = KeptRounds(
        kept_path,
        {
            "version": ridgeline.__version__,
            "executor": executor,
            "kernels": ceilings.conditions.get("kernels"),
            "threads": usable_cores(),
            "steps": [
                [m.name, m.format, dict(shapes[m.name]), list(map(str, s))] for m, s in planned
            ],
        },
    )
    measured = measure_in_turns(
        planned,
        rounds=_QUICK_ROUNDS if quick else _ROUNDS,
        most_rounds=2 * _ROUNDS,
        between=lambda: rates.append(rates_now(executor)),
        shares=shares,
        kept=kept,
        until_s=until_s,
        progress=progress,
    )
    kept.forget()
    conditions = {
        "quick": quick,
        "others_share": round(statistics.median(shares), 3),
        "contended": num_quiet(shares) < _QUIET_ROUNDS,
    }
    ceilings = with_best(ceilings, rates)
    ceilings = replace(ceilings, conditions={**ceilings.conditions, **conditions})
    samples = [
        sample
        for model, times in zip(models, measured, strict=True)
        for sample in samples_of(times, model.priced, ceilings)
    ]
    return calibrate(
        samples,
        ceilings,
        executor=executor,
        dense_attention=executor_traits(executor).dense_attention,
        host_step_s=host_step_s,
        host_segment_s=host_segment_s,
        needed=(SMALL,),
    )


def _built(
    executor: str, shapes: Mapping[str, Config], formats: Sequence[str], progress: Progress | None
) -> list[BenchModel]:
    """Each shape in each format, with random weights."""
    wanted, models = [(name, form) for form in formats for name in shapes], list[BenchModel]()
    for number, (name, form) in enumerate(wanted):
        if progress is not None:
            progress(number, len(wanted), f"making {name} in {form}")
        models.append(build(name, shapes[name], form, executor=executor))
    return models


def host_seconds(num_steps: int = 60) -> tuple[float, float]:
    """Seconds that the scheduler and the loop take for a step, and for each sequence in it; the
    fastest of a few runs."""
    one, many = (
        min(_loop_step_s(count, num_steps) for _ in range(_HOST_RUNS)) for count in (1, 33)
    )
    per_segment = max(0.0, (many - one) / 32)
    return max(0.0, one - per_segment), per_segment


def _loop_step_s(num_sequences: int, num_steps: int) -> float:
    """Wall seconds of a step whose execution takes none, and which is no replay of several."""
    spec = describe(SHAPES["wide"]).spec
    model = PricedModel(spec=spec, ops=lower(spec))
    clock, free = VirtualClock(), LinearPredictor(pass_s=0.0, token_s=0.0)
    executor = SimulatedExecutor({ModelRole.TARGET: model}, free, clock)
    config = EngineConfig(max_num_seqs=num_sequences, max_model_len=512, decode_replay_s=0.0)
    loop, scheduler = make_loop(executor, config, clock, predictor=free, kv_pool_bytes=1e9)
    one = Arrival(arrival_s=0.0, prompt_tokens=8, output_tokens=num_steps)
    start = time.perf_counter()
    run_arrivals(loop, scheduler, [one] * num_sequences, clock)
    return (time.perf_counter() - start) / executor.num_steps
