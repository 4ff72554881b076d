"""Each stage against transformers' processor of the same name, and the draw against softmax."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from ridgeline import SamplingParams
from ridgeline.decoding import History, NothingToSampleError, process_logits, sample, token_logprobs
from ridgeline.decoding.sampling import softmax

VOCAB = 97
PROMPT, OUTPUT = [5, 6, 7, 5], [8, 9, 8, 8]
HISTORY = History(token_ids=PROMPT + OUTPUT, num_prompt_tokens=len(PROMPT))

STAGES = [
    (SamplingParams(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
    (SamplingParams(top_k=9), [hf.TopKLogitsWarper(9)]),
    (SamplingParams(top_p=0.6), [hf.TopPLogitsWarper(0.6)]),
    (SamplingParams(top_p=0.01), [hf.TopPLogitsWarper(0.01)]),
    (SamplingParams(min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
    (
        SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
        [
            hf.TemperatureLogitsWarper(1.3),
            hf.TopKLogitsWarper(40),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
    (
        SamplingParams(repetition_penalty=1.5),
        [hf.RepetitionPenaltyLogitsProcessor(1.5)],
    ),
    (
        SamplingParams(logit_bias={3: 5.0, 90: -7.0}),
        [hf.SequenceBiasLogitsProcessor({(3,): 5.0, (90,): -7.0})],
    ),
]


@pytest.mark.parametrize(("params", "processors"), STAGES)
@pytest.mark.parametrize("seed", range(5))
def test_stages_equal_transformers(params, processors, seed):
    logits = np.random.default_rng(seed).normal(size=VOCAB) * 3
    expected = torch.from_numpy(logits)[None]
    for processor in processors:
        expected = processor(torch.tensor([HISTORY.token_ids]), expected)
    ours = process_logits(logits, params, HISTORY)
    np.testing.assert_allclose(ours, expected[0] - expected[0].max(), rtol=1e-9)  # up to a constant


def test_a_min_p_of_one_leaves_the_best_alone():
    logits = np.array([0.0, 2.0, 1.999, -1.0])
    kept = process_logits(logits, SamplingParams(min_p=1.0), HISTORY)
    assert np.flatnonzero(np.isfinite(kept)).tolist() == [1]


def test_presence_and_frequency_count_only_the_output():
    logits = np.zeros(VOCAB)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    expected = np.zeros(VOCAB)
    expected[8], expected[9] = -0.5 - 3 * 0.25, -0.5 - 0.25
    ours = process_logits(logits, params, HISTORY)
    np.testing.assert_allclose(ours, expected)


def test_min_tokens_bars_every_end():
    params = SamplingParams(min_tokens=5, stop_token_ids=(11,))
    logits = np.zeros(VOCAB)
    early = History(token_ids=PROMPT + OUTPUT, num_prompt_tokens=4, eos_token_ids=(12,))
    late = History(token_ids=PROMPT + OUTPUT + [1], num_prompt_tokens=4, eos_token_ids=(12,))
    assert np.flatnonzero(np.isinf(process_logits(logits, params, early))).tolist() == [11, 12]
    assert not np.isinf(process_logits(logits, params, late)).any()


def test_mask_comes_before_everything():
    mask = np.zeros(VOCAB, dtype=bool)
    mask[[20, 30]] = True
    for seed in range(50):
        params = SamplingParams(top_k=5, temperature=2.0)
        token = sample(
            np.random.default_rng(seed).normal(size=VOCAB), params, HISTORY, seed=seed, mask_V=mask
        )
        assert token in (20, 30)


def test_greedy_is_argmax():
    logits = np.random.default_rng(0).normal(size=VOCAB)
    assert sample(logits, SamplingParams(temperature=0), HISTORY, seed=1) == int(logits.argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_p=0.8),
        SamplingParams(top_k=4, repetition_penalty=1.3),
    ],
)
def test_draws_follow_the_distribution(params):
    """Chi-square over 5,000 seeds: p < 0.0005 fails."""
    logits = np.random.default_rng(1).normal(size=16)
    history = History(token_ids=[1, 2, 3], num_prompt_tokens=2)
    draws = [sample(logits, params, history, seed=seed) for seed in range(5_000)]
    observed = np.bincount(draws, minlength=16)
    expected = softmax(process_logits(logits, params, history)) * len(draws)
    likely = expected > 0
    assert observed[~likely].sum() == 0
    statistic = ((observed[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    # Wilson-Hilferty approximation of the chi-square quantile at 0.9995.
    degrees = likely.sum() - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.29 * np.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < bound


def test_samples_of_one_request_are_independent():
    logits = np.zeros(64)
    draws = {sample(logits, SamplingParams(), HISTORY, seed=1, sample_index=i) for i in range(32)}
    assert len(draws) > 16


def test_logprobs():
    logits = np.array([1.0, 3.0, 2.0, 0.0], dtype=np.float32)
    entry = token_logprobs(logits, 2, 2)
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(float(expected[2]))
    assert [token for token, _ in entry.top] == [1, 2]
    assert token_logprobs(logits, 0, 100).rank == 3


def test_the_coldest_temperature_is_greedy():
    params = SamplingParams(temperature=5e-324)
    for seed in range(20):
        assert sample(np.array([1.0, 5.0, 9.0, 2.0]), params, HISTORY, seed=seed) == 2


def test_when_only_an_end_is_possible_min_tokens_gives_way():
    params = SamplingParams(min_tokens=9, stop_token_ids=(0, 1, 2))
    assert sample(np.array([1.0, 5.0, 2.0]), params, HISTORY, seed=0) in (0, 1, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_to_sample_is_an_error_of_its_own(temperature):
    params = SamplingParams(temperature=temperature)
    nothing = np.zeros(4, dtype=bool)
    with pytest.raises(NothingToSampleError):
        sample(np.zeros(4), params, HISTORY, seed=0, mask_V=nothing)
    with pytest.raises(NothingToSampleError):
        sample(np.full(4, np.nan), params, HISTORY, seed=0)


@pytest.mark.parametrize("levels", [2, 1000])
def test_the_most_likely_come_first_and_of_equals_the_lowest_token(levels):
    logits = np.random.default_rng(0).integers(0, levels, 20).astype(np.float32)
    expected = torch.from_numpy(logits).double().log_softmax(-1).tolist()
    best = sorted(range(20), key=lambda token: (-expected[token], token))
    for count in range(22):
        top = token_logprobs(logits, 0, count).top
        assert [token for token, _ in top] == best[:count]
        assert [logprob for _, logprob in top] == pytest.approx([expected[t] for t in best[:count]])
