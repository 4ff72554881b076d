"""Calibrating predictions: steps of small models of random weights, measured and fitted.

Two shapes, both too large for the caches, in each number format, at several batches and contexts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.bench.ceilings import CeilingMeter, measure_ceilings
from ridgeline.bench.native_loops import load_native_loops
from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.bench.torch_ceilings import torch_ceilings
from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import ON_LOAD
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors import ExecutorModel, create_executor
from ridgeline.executors.priced import priced_model
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.models import describe, lower
from ridgeline.planning.simulation import make_loop, run_arrivals
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.calibration import Calibration, calibrate
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.features import pass_terms
from ridgeline.roofline.fitting import Sample
from ridgeline.scheduler.pricing import LinearPrice
from ridgeline.weights import dummy_weights

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


# Weights of both are beyond 128 MiB in 16 bits, so that no cache holds them.
SHAPES: Mapping[str, Config] = {
    "wide": shape(1024, 2816, 6, 16, 4, 4096),
    "deep": shape(640, 1792, 14, 10, 10, 4096),
}
FORMATS: Mapping[str, Sequence[str]] = {
    "cpu": ("float32", "bfloat16", "int8", "int4"),
    "reference": ("float32", "bfloat16"),
}
STEPS = (
    *(StepShape(batch_size=b, num_tokens=1, context=c) for b, c in (
        (1, 32), (1, 500), (1, 1500), (2, 200), (4, 32), (4, 800), (8, 100), (8, 500),
        (16, 32), (16, 300),
    )),
    *(StepShape(batch_size=b, num_tokens=n, context=c) for b, n, c in (
        (1, 16, 0), (1, 32, 64), (1, 64, 0), (1, 128, 0), (1, 128, 512), (1, 256, 0),
        (2, 64, 100), (1, 512, 0), (4, 32, 0),
    )),
)  # fmt: skip
_LONG_S = 0.5  # steps that the roof says take longer are left out


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model of random weights, as an executor runs it and as the roofline prices it."""

    name: str
    format: str
    executor: Executor
    priced: PricedModel


def build(
    name: str, config: Config, number_format: str, *, executor: str, block_tokens: int = 16
) -> BenchModel:
    """An executor with random weights of a config's shapes.

    A format that weights are quantized to on load is made from bfloat16.
    """
    spec = describe(config).spec
    ops = lower(spec)
    quantization = number_format if number_format in ON_LOAD else None
    dtype: torch.dtype = torch.bfloat16 if quantization else getattr(torch, number_format)
    weights = dummy_weights(ops, dtype=dtype, seed=0)
    model = ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype)
    made = create_executor(
        executor,
        {ModelRole.TARGET: model},
        block_tokens=block_tokens,
        quantization=quantization,
    )
    priced = priced_model(model, made.name, quantization=quantization)
    return BenchModel(name=name, format=number_format, executor=made, priced=priced)


def measure_samples(
    model: BenchModel, ceilings: Ceilings, steps: Sequence[StepShape] = STEPS
) -> list[Sample]:
    """Each step's terms and measured seconds; the executor is closed at the end."""
    timer = StepTimer(
        model.executor,
        max_batch=max(step.batch_size for step in steps),
        max_context=max(step.context + step.num_tokens for step in steps),
    )
    try:
        samples = []
        for step in steps:
            terms = pass_terms(model.priced, make_batch(step.ranges), ceilings)
            if sum(value for name, value in terms.items() if "@" in name) < _LONG_S:
                samples.append(
                    Sample(
                        terms=terms,
                        seconds=timer.measure(step),
                        shape=model.name,
                        format=model.format,
                        phase=step.phase,
                    )
                )
        return samples
    finally:
        model.executor.close()


def measure_roof(executor: str) -> Ceilings:
    """The ceilings of what an executor computes with: native loops, or PyTorch."""
    if executor == "cpu":
        return measure_ceilings(load_native_loops(), rounds=2).ceilings()
    return torch_ceilings()


def memory_rate(executor: str) -> float:
    """Main memory's bytes per second alone: whether it is still what `measure_roof` found."""
    if executor == "cpu":
        meter = CeilingMeter(load_native_loops())
        meter.sample()
        return meter.report().memory_bytes_per_s
    return torch_ceilings((), rounds=1).memory.bytes_per_s


def calibrate_here(
    executor: str,
    *,
    shapes: Mapping[str, Config] = SHAPES,
    formats: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure the ceilings and the steps, and fit; about a minute on two cores."""
    ceilings = measure_roof(executor)
    samples: list[Sample] = []
    cases = [(name, form) for form in formats or FORMATS[executor] for name in shapes]
    dense = False
    for index, (name, form) in enumerate(cases):
        if progress is not None:
            progress(index, len(cases), f"measuring {name} in {form}")
        model = build(name, shapes[name], form, executor=executor)
        dense = model.priced.dense_attention
        samples += measure_samples(model, ceilings)
    host_step_s, host_segment_s = host_seconds()
    return calibrate(
        samples,
        ceilings,
        executor=executor,
        dense_attention=dense,
        host_step_s=host_step_s,
        host_segment_s=host_segment_s,
    )


def host_seconds(num_steps: int = 60) -> tuple[float, float]:
    """Seconds that the scheduler and the loop take for a step, and for each sequence in it."""
    one, many = (_loop_step_s(count, num_steps) for count in (1, 33))
    per_segment = max(0.0, (many - one) / 32)
    return max(0.0, one - per_segment), per_segment


def _loop_step_s(num_sequences: int, num_steps: int) -> float:
    """Wall seconds of a step whose execution takes none."""
    spec = describe(SHAPES["wide"]).spec
    model = PricedModel(spec=spec, ops=lower(spec))
    clock, free = VirtualClock(), LinearPrice(pass_s=0.0, token_s=0.0)
    executor = SimulatedExecutor({ModelRole.TARGET: model}, free, clock)
    config = EngineConfig(max_num_seqs=num_sequences, max_model_len=512)
    loop, scheduler = make_loop(executor, config, clock, price=free, kv_pool_bytes=1e9)
    one = Arrival(arrival_s=0.0, prompt_tokens=8, output_tokens=num_steps)
    start = time.perf_counter()
    run_arrivals(loop, scheduler, [one] * num_sequences, clock)
    return (time.perf_counter() - start) / executor.num_steps
