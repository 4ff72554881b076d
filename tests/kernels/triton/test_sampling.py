"""Draws against the sampling functions in PyTorch, token for token."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.triton.device import DEVICE, random

from ridgeline.core.rounding import ceil_div
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding import History, NothingToSampleError
from ridgeline.decoding import sample as reference_sample
from ridgeline.kernels.tensors import as_array
from ridgeline.kernels.triton import SampleWorkspace, SamplingRows, draw_kernels, sample, sampling

VOCAB = 2503
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
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
]


def rows_of(params, seeds, positions):
    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    slots = np.random.default_rng(len(params)).permutation(len(params)).tolist()
    by_slot = sorted(range(len(params)), key=lambda row: slots[row])
    return SamplingRows(
        slots_N=column(slots, torch.int64),
        position_N=column(positions, torch.int32),
        temperature_R=column([params[row].temperature for row in by_slot], torch.float64),
        seed_R=column([signed[row] for row in by_slot], torch.int64),
        sample_index_R=column(by_slot, torch.int32),
        top_k_R=column([params[row].top_k for row in by_slot], torch.int32),
        top_p_R=column([params[row].top_p for row in by_slot], torch.float64),
        min_p_R=column([params[row].min_p for row in by_slot], torch.float64),
    )


def draw(logits, rows, *, truncate=True, masks=None, workspace=None):
    tokens = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
    workspace = workspace or SampleWorkspace(len(logits), DEVICE)
    sample(logits, rows, tokens, workspace=workspace, truncate=truncate, masks_NW=masks)
    assert not workspace.counters.any()
    assert not workspace.histograms.any()
    return tokens.tolist()


def expected_draw(logits_V, params, *, seed, index, position, allowed=None, known=None):
    history = History(token_ids=known or [0] * position, num_prompt_tokens=10)
    try:
        return reference_sample(
            as_array(logits_V), params, history, seed=seed, sample_index=index, mask_V=allowed
        )
    except NothingToSampleError:
        return -1


@pytest.mark.parametrize(
    ("spread", "rounded"),
    [pytest.param(0.5, False, marks=pytest.mark.slow), (3.0, True), (12.0, False)],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_draws_are_those_of_the_sampling_functions(spread, rounded, filtered, monkeypatch):
    """``rounded``: logits from few values, so that many are equal. ``filtered``: a program has
    several blocks of a row, and passes over what cannot be the best."""
    if filtered:
        monkeypatch.setattr(sampling, "_PROGRAMS_EACH", 1)
        monkeypatch.setattr(sampling, "_FILTERED_BLOCKS", 1)
    rng = np.random.default_rng(7)
    params = [SamplingParams(**settings) for settings in SETTINGS]
    count = len(params)
    seeds = [int(seed) for seed in rng.integers(0, 2**64, size=count, dtype=np.uint64)]
    positions = [int(each) for each in rng.integers(1, 50, size=count)]
    logits = torch.from_numpy((rng.normal(size=(count, VOCAB)) * spread).astype(np.float32))
    if rounded:
        logits = (logits * 2).round() / 2
    words = rng.integers(0, 2**32, size=(count, ceil_div(VOCAB, 32)), dtype=np.uint32)
    words[::2] = 2**32 - 1  # every other row may draw anything
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    rows = rows_of(params, seeds, positions)
    masks = torch.from_numpy(words.view(np.int32)).to(DEVICE)
    assert draw(logits.to(DEVICE), rows, masks=masks) == [
        expected_draw(
            logits[row], params[row], seed=seeds[row], index=row, position=positions[row],
            allowed=bits[row].astype(bool),
        )
        for row in range(count)
    ]  # fmt: skip
    plain = draw(logits[:4].to(DEVICE), rows_of(params[:4], seeds[:4], positions), truncate=False)
    assert plain == [
        expected_draw(logits[row], params[row], seed=seeds[row], index=row, position=positions[row])
        for row in range(4)
    ]


@triton.jit
def _score(logits, bits, temperatures, rough, exact, BLOCK: tl.constexpr):
    temperature = tl.load(temperatures)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, words = tl.load(logits + at), tl.load(bits + at)
    tl.store(rough + at, draw_kernels._nearly(x, temperature, words))
    tl.store(exact + at, x.to(tl.float64) / temperature + draw_kernels._noise(words))


@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 40.0])
def test_rough_scores_are_within_their_bound(temperature):
    ends = torch.arange(1 << 15)
    bits = torch.cat([ends, (1 << 23) - 1 - ends, (random(1 << 16).cpu().abs() * (1 << 21)).long()])
    bits = bits.clamp(0, (1 << 23) - 1).int().to(DEVICE)
    x = random(len(bits), seed=1) * 20
    rough, exact = torch.empty_like(x), x.double()
    temperatures = torch.tensor([temperature], dtype=torch.float64, device=DEVICE)
    _score[(len(bits) // 1024,)](x, bits, temperatures, rough, exact, BLOCK=1024)
    assert ((rough - exact).abs() <= 1e-4 + 1e-6 * exact.abs()).all()


FEW = [
    {"temperature": 1.0, "top_p": 1e-3},
    {"temperature": 1.0, "top_p": 0.02},
    {"temperature": 0.7, "top_p": 0.3},
    {"temperature": 1.0, "min_p": 0.9},
    {"temperature": 1.0, "top_p": 0.4, "min_p": 0.9},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 2.0, "top_k": 200, "top_p": 0.05},
    {"temperature": 2.0, "top_k": 1999, "top_p": 0.7, "min_p": 0.5},
]


TYPES, SHIFTS = (torch.float32, torch.float16, torch.bfloat16), (-30.0, 0.0, 30.0)


@pytest.mark.parametrize(
    ("dtype", "shift"),
    [
        pytest.param(dtype, shift, marks=() if column == row else pytest.mark.slow)
        for row, dtype in enumerate(TYPES)
        for column, shift in enumerate(SHIFTS)
    ],
)
def test_few_tokens_of_flat_distributions(dtype, shift):
    """Draws are thrown away many times before one is kept; logits are equal, or nearly."""
    rng = np.random.default_rng(11)
    params = [SamplingParams(**settings) for settings in FEW for _ in range(3)]
    seeds = list(range(len(params)))
    values = rng.normal(size=(len(params), VOCAB)) * 0.1 + shift
    logits = torch.from_numpy(values).to(dtype)
    logits[:, ::7] *= -0.0 if shift == 0.0 else 1.0  # zeros of both signs
    found = draw(logits.to(DEVICE), rows_of(params, seeds, [9] * len(params)))
    assert found == [
        expected_draw(logits[row].float(), params[row], seed=seeds[row], index=row, position=9)
        for row in range(len(params))
    ]


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[7]], ids=str)
def test_what_cannot_be_drawn_is_not(settings):
    params = [SamplingParams(**settings)] * 4
    logits = torch.zeros(4, VOCAB)
    logits[1, 2000] = float("nan")
    logits[2] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 1234] = -1e30
    rows = rows_of(params, [1, 2, 3, 4], [5, 5, 5, 5])
    workspace = SampleWorkspace(4, DEVICE)
    for truncate in (True, False):
        found = draw(logits.to(DEVICE), rows, truncate=truncate, workspace=workspace)
        assert found[1:] == [-1, -1, 1234]
        assert found[0] >= 0
    masks = torch.zeros(4, ceil_div(VOCAB, 32), dtype=torch.int32, device=DEVICE)
    masks[1:, 3] = 1 << 4
    found = draw(torch.zeros(4, VOCAB, device=DEVICE), rows, masks=masks)
    assert found == [-1, 100, 100, 100]
    logits[:, 7] = float("inf")
    for truncate in (True, False):
        found = draw(logits.to(DEVICE), rows, truncate=truncate)
        assert found == ([7, -1, 7, 7] if params[0].is_greedy else [-1] * 4)
    with pytest.raises(ValueError, match="rows"):
        draw(logits.to(DEVICE), rows, workspace=SampleWorkspace(3, DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fewer_tokens_than_top_k_wants(dtype):
    logits = torch.full((2, VOCAB), float("-inf"), dtype=dtype)
    logits[:, [5, 1900]] = -3.0
    params = [SamplingParams(temperature=1.0, top_k=9)] * 2
    found = draw(logits.to(DEVICE), rows_of(params, [1, 2], [5, 5]))
    assert found == [
        expected_draw(logits[row].float(), params[row], seed=row + 1, index=row, position=5)
        for row in range(2)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_part_of_a_row_that_has_nothing_but_nan_tells_of_it(temperature):
    logits = torch.zeros(1, VOCAB)
    logits[0, 1024:2048] = float("-inf")  # what one program looks at, here as on a GPU
    logits[0, 1500] = float("nan")
    rows = rows_of([SamplingParams(temperature=temperature)], [1], [5])
    assert draw(logits.to(DEVICE), rows, truncate=False) == [-1]


def test_equal_logits_are_told_apart_by_noise_and_greedy_takes_the_first():
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    logits[:, 500:] = 1
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]
    found = draw(logits, rows_of(params, [3, 3], [8, 8]))
    assert found[0] == 500
    assert found[1] == expected_draw(logits[1], params[1], seed=3, index=1, position=8)
