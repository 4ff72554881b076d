"""A token's bits do not depend on its batch or its chunk, on any level and in any format."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.tiny import (
    CHUNKED,
    CONFIG,
    EXPERTS,
    LATENT,
    SINKS,
    SOFTCAPPED,
    STREAMS,
    Driver,
    tiny_executor,
    tiny_model,
)

from ridgeline.core.formats import on_load_format
from ridgeline.core.plan import Outputs
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import available_levels

MODELS = {
    "dense": CONFIG,
    "windowed, soft caps": SOFTCAPPED,
    "experts": EXPERTS,
    "latent": LATENT,
    "sinks": SINKS,
    "chunks": CHUNKED,
    "streams": STREAMS,
}
LENGTHS = (90, 1, 37)  # beyond a chunk of attention, and its windows
PROMPTS = [[(7 * i + i * i + 11 * n) % 151 for i in range(LENGTHS[n])] for n in range(3)]
# Tokens of each prompt in each step.
ALONE = ((90,), (0, 1), (0, 0, 37))
SCHEDULES = {
    "batched": ((90,), (1,), (37,)),
    "chunked": ((1, 6, 30, 53), (0, 0, 0, 0, 1), (0, 0, 0, 0, 0, 36, 1)),
    "both": ((50, 1, 39), (0, 1), (0, 20, 17)),
}


FORMATS = [
    *((weights, kv) for weights in (None, "int8", "int4") for kv in ("bfloat16", "int8")),
    ("int4", "int4"),
    (None, "fp8"),
]


@cache
def model(name: str, quantization: str | None, head_dim: int | None) -> ExecutorModel:
    widened = {} if head_dim is None else {"head_dim": head_dim}
    plain = tiny_model(MODELS[name] | widened, dtype="bfloat16")
    return replace(plain, quantization=on_load_format(quantization))


def logits_of(
    driver: Driver, first_slot: int, schedule: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Of all tokens of each prompt."""
    logits: list[list[np.ndarray]] = [[] for _ in PROMPTS]
    starts = [0] * len(PROMPTS)
    for step in range(max(map(len, schedule))):
        segments, admissions, taken = [], [], []
        for number, (prompt, counts) in enumerate(zip(PROMPTS, schedule, strict=True)):
            count, slot = counts[step] if step < len(counts) else 0, first_slot + number
            if not count:
                continue
            start = starts[number]
            if not start:
                admissions.append(driver.admit(slot, prompt))
            tokens = prompt[start : start + count]
            outputs = Outputs(logits=True)
            segments.append(driver.segment(slot, start, tokens, fresh=not start, outputs=outputs))
            starts[number] += count
            taken.append(number)
        results = driver.run(*segments, admissions=tuple(admissions)).passes[0]
        for number, result in zip(taken, results, strict=True):
            logits[number].append(result.logits)
    assert tuple(starts) == LENGTHS
    return [np.concatenate(rows) for rows in logits]


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), FORMATS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", available_levels())
def test_batched_and_chunked_have_the_bits_of_alone(level, name, quantization, kv_cache_dtype):
    if (name, kv_cache_dtype) == ("latent", "int4"):
        pytest.skip("refused")
    executor = tiny_executor(
        model=model(name, quantization, 32 if kv_cache_dtype == "int4" else None),
        block_tokens=16,
        num_blocks=80,
        make=lambda models, size: CPUExecutor(
            models, size, kv_cache_dtype=kv_cache_dtype, level=level
        ),
    )
    driver = Driver(executor, blocks_per_slot=6)
    alone = logits_of(driver, 0, ALONE)
    for number, (how, schedule) in enumerate(SCHEDULES.items(), 1):
        for got, want in zip(logits_of(driver, 3 * number, schedule), alone, strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, want, err_msg=how)
    executor.close()
