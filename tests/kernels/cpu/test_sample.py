"""The native sampler against the sampling functions in PyTorch, draw for draw."""

import numpy as np
import pytest
from tests.kernels.cpu.native import LEVELS, pool

from ridgeline.core.rounding import ceil_div
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding import History, NothingToSampleError, sample
from ridgeline.executors.cpu.adjust import CountedHistory, adjust
from ridgeline.kernels.cpu.structs import SAMPLING

VOCAB = 1003
DRAWS = 60
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 50.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 1e-46},  # 0 as the float that the row holds
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {3: 4.0, 7: -100.0}},
]


def draw(level, logits_V, params, *, position, seed, mask=None, barred=(), barred_until=0):
    row = np.zeros(1, dtype=SAMPLING)
    row["logits"] = logits_V.ctypes.data
    barred = np.array(barred, dtype=np.int32)
    if mask is not None:
        row["mask"] = mask.ctypes.data
    row["barred"], row["num_barred"] = barred.ctypes.data, len(barred)
    row["barred_until"] = barred_until
    row["temperature"], row["top_p"], row["min_p"] = params.temperature, params.top_p, params.min_p
    row["top_k"], row["seed"], row["position"] = max(params.top_k, 0), seed, position
    token, threads = np.empty(1, dtype=np.int32), pool(level, 2)
    threads.library.rl_sample(threads.handle, row.ctypes.data, 1, len(logits_V), token.ctypes.data)
    return int(token[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_are_those_of_the_sampling_functions(level, spread, settings):
    rng, params = np.random.default_rng(7), SamplingParams(**settings)
    for seed in range(DRAWS):
        logits = (rng.normal(size=VOCAB) * spread).astype(np.float32)
        known = rng.integers(0, VOCAB, size=40).tolist()
        words = rng.integers(0, 2**32, size=ceil_div(VOCAB, 32), dtype=np.uint32)
        mask = words if seed % 3 == 0 else None
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        expected = sample(
            logits,
            params,
            History(token_ids=known, num_prompt_tokens=10),
            seed=seed,
            mask_V=None if mask is None else allowed,
        )
        row = adjust(logits, params, CountedHistory(10, known))
        token = draw(level, row, params, position=len(known), seed=seed, mask=mask)
        assert token == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("settings", SETTINGS[:13], ids=str)
def test_what_cannot_be_drawn_is_not(level, settings):
    params = SamplingParams(**settings)
    logits = np.zeros(VOCAB, dtype=np.float32)
    nothing = np.zeros(ceil_div(VOCAB, 32), dtype=np.uint32)
    assert draw(level, logits, params, position=4, seed=1, mask=nothing) == -1
    only = nothing.copy()
    only[0] = 1 << 5
    for value in (0.0, -1e30, np.inf):
        logits[5] = value
        assert draw(level, logits, params, position=4, seed=1, mask=only) == 5
    logits[5] = np.nan
    assert draw(level, logits, params, position=4, seed=1, mask=only) == -1
    assert draw(level, logits, params, position=4, seed=1) == -1
    with pytest.raises(NothingToSampleError):
        sample(logits, params, History(token_ids=[1], num_prompt_tokens=1), seed=1)


@pytest.mark.parametrize("level", LEVELS)
def test_barred_tokens_wait_for_their_position_unless_nothing_else_can_come(level):
    params = SamplingParams(temperature=0.0)
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[9], logits[4] = 5.0, 3.0
    bars = {"barred": [9], "barred_until": 12}
    assert draw(level, logits, params, position=11, seed=0, **bars) == 4
    assert draw(level, logits, params, position=12, seed=0, **bars) == 9
    only = np.zeros(ceil_div(VOCAB, 32), dtype=np.uint32)
    only[0] = 1 << 9
    assert draw(level, logits, params, position=11, seed=0, mask=only, **bars) == 9


@pytest.mark.parametrize("level", LEVELS)
def test_each_of_many_barred_tokens_waits(level):
    params = SamplingParams(temperature=0.0)
    rng = np.random.default_rng(3)
    logits = rng.normal(size=VOCAB).astype(np.float32)
    order = np.argsort(-logits)
    bars = {"barred": sorted(order[:-1].tolist()), "barred_until": 12}
    assert draw(level, logits, params, position=11, seed=0, **bars) == order[-1]
    assert draw(level, logits, params, position=12, seed=0, **bars) == order[0]
