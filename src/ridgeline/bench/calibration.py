"""Calibrating predictions: steps of small models of random weights, measured and fitted.

Two shapes, both too large for the caches, in each number format, at several batches and contexts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.bench.torch_ceilings import torch_ceilings
from ridgeline.core.formats import float_format
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors import ExecutorModel, create_executor
from ridgeline.models import describe, lower
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.calibration import Calibration, calibrate
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.features import pass_terms
from ridgeline.roofline.fitting import Sample
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
FORMATS = ("float32", "bfloat16")
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
    """An executor with random weights of a config's shapes."""
    spec = describe(config).spec
    ops = lower(spec)
    dtype: torch.dtype = getattr(torch, number_format)
    weights = dummy_weights(ops, dtype=dtype, seed=0)
    model = ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype)
    made = create_executor(executor, {ModelRole.TARGET: model}, block_tokens=block_tokens)
    priced = PricedModel(
        spec=spec,
        ops=ops,
        activations=float_format(number_format),
        dense_attention=made.name == "reference",
    )
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


def calibrate_here(
    executor: str = "auto",
    *,
    shapes: Mapping[str, Config] = SHAPES,
    formats: Sequence[str] = FORMATS,
    progress: Progress | None = None,
) -> Calibration:
    """Measure the ceilings and the steps, and fit; about a minute on two cores."""
    ceilings = torch_ceilings()
    samples: list[Sample] = []
    cases = [(name, form) for form in formats for name in shapes]
    dense, made = False, executor
    for index, (name, form) in enumerate(cases):
        if progress is not None:
            progress(index, len(cases), f"measuring {name} in {form}")
        model = build(name, shapes[name], form, executor=executor)
        dense, made = model.priced.dense_attention, model.executor.name
        samples += measure_samples(model, ceilings)
    host_step_s = host_segment_s = 0.0
    return calibrate(
        samples,
        ceilings,
        executor=made,
        dense_attention=dense,
        host_step_s=host_step_s,
        host_segment_s=host_segment_s,
    )
