"""The rule of rejection sampling: outputs are distributed as direct ones, over 200,000 draws; the
same test catches wrong rules. `tests/equivalence/test_rejection.py` does so with whole engines."""

import math

import numpy as np
import pytest

from ridgeline.core.philox import NoiseStream
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding import History, process_logits, rejection
from ridgeline.decoding.rejection import accepts, propose, residual, verify_by_rejection
from ridgeline.decoding.sampling import NothingToSampleError, softmax

DRAWS = 200_000
VOCAB = 9
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.7),
    "top-p": SamplingParams(temperature=1.3, top_p=0.9),
    "top-k and min-p": SamplingParams(temperature=1.2, top_k=5, min_p=0.05),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.4),
}


def gumbel(shape, generator):
    return generator.gumbel(size=shape)


def draw(p_NV, generator):
    with np.errstate(divide="ignore"):
        return (np.log(p_NV) + gumbel(p_NV.shape, generator)).argmax(-1)


def tables(params, seed):
    """p and q of the first token, and of the second after each first: ``[1 + V, V]``."""
    generator = np.random.default_rng(seed)
    target = generator.normal(size=(1 + VOCAB, VOCAB)) * 1.5
    draft = target + 1.5 * generator.normal(size=target.shape)
    rows = []
    for logits in (target, draft):
        histories = [(1, 2)] + [(1, 2, first) for first in range(VOCAB)]
        rows.append(
            np.stack(
                [
                    softmax(
                        process_logits(row, params, History(token_ids=history, num_prompt_tokens=2))
                    )
                    for row, history in zip(logits, histories, strict=True)
                ]
            )
        )
    return rows


def speculate(p, q, rule, seed):
    """Two drafted tokens and one more, as a verifier of chains makes them; the first two of it."""
    generator = np.random.default_rng(seed)
    first_q = np.repeat(q[:1], DRAWS, axis=0)
    drafts = [draw(first_q, generator)]
    drafts.append(draw(q[1 + drafts[0]], generator))
    first, accepted = rule(np.repeat(p[:1], DRAWS, axis=0), first_q, drafts[0], generator)
    # After a rejection the second token is the next step's: drawn from the target.
    second_p = p[1 + first]
    verified, _ = rule(second_p, q[1 + drafts[0]], drafts[1], generator)
    second = np.where(accepted, verified, draw(second_p, generator))
    return first * VOCAB + second


def right(p, q, drafts, generator):
    uniform = generator.random(DRAWS)
    accepted = accepts(p, q, drafts, uniform)
    return np.where(accepted, drafts, draw(residual(p, q), generator)), accepted


def redraws_from_the_target(p, q, drafts, generator):
    """A common mistake: the residual is forgotten."""
    tokens, accepted = right(p, q, drafts, generator)
    return np.where(accepted, tokens, draw(p, generator)), accepted


def forgets_the_draft_probability(p, q, drafts, generator):
    uniform = generator.random(DRAWS)
    tokens, _ = right(p, q, drafts, generator)
    accepted = uniform < p[np.arange(DRAWS), drafts]
    return np.where(accepted, drafts, tokens), accepted


def deviation(counts, expected):
    """How many standard deviations chi-square is from its mean (Wilson and Hilferty 1931)."""
    kept = expected > 5
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert counts[expected == 0].sum() == 0, "an impossible token was drawn"
    degrees = int(kept.sum()) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def deviation_of(rule, params, seed=0):
    p, q = tables(params, seed)
    counts = np.bincount(speculate(p, q, rule, seed), minlength=VOCAB**2)
    expected = (p[0][:, None] * p[1:]).flatten() * DRAWS
    return deviation(counts, expected)


@pytest.mark.parametrize("name", PARAMS)
def test_outputs_are_distributed_as_direct_ones(name):
    assert deviation_of(right, PARAMS[name]) < 4


@pytest.mark.parametrize("rule", [redraws_from_the_target, forgets_the_draft_probability])
@pytest.mark.parametrize("name", PARAMS)
def test_wrong_rules_are_caught(name, rule):
    assert deviation_of(rule, PARAMS[name]) > 20


def test_a_draft_without_a_distribution():
    """A looked-up token is accepted as often as the target would draw it."""
    p = np.repeat([[0.5, 0.3, 0.2]], DRAWS, axis=0)
    drafts = np.ones(DRAWS, dtype=np.int64)
    q = np.eye(3)[drafts]
    tokens, accepted = right(p, q, drafts, np.random.default_rng(1))
    counts = np.bincount(tokens, minlength=3)
    assert deviation(counts, p[0] * DRAWS) < 4
    assert float(accepted.mean()) == pytest.approx(0.3, abs=0.01)


def test_equal_distributions_accept_everything():
    p, _ = tables(PARAMS["top-p"], 3)
    generator = np.random.default_rng(2)
    first = np.repeat(p[:1], DRAWS, axis=0)
    tokens, accepted = right(first, first, draw(first, generator), generator)
    assert accepted.all()
    assert (first[0][tokens] > 0).all()


def test_where_no_token_is_possible_none_is_drafted_nor_drawn():
    params, known = SamplingParams(temperature=1.0), History(token_ids=[1], num_prompt_tokens=1)
    drawn = {"seed": 0, "sample_index": 0}
    for nothing in (np.full(4, -np.inf), np.full(4, np.nan)):
        with pytest.raises(NothingToSampleError):
            propose(nothing, params, known, **drawn)
        for possible in (0, 1):  # rows of the target before that, in which the draft is certain
            rows = [np.log(np.eye(4)[2] + 1e-30)] * possible + [nothing]
            with pytest.raises(NothingToSampleError):
                verify_by_rejection(
                    [2] * possible, [None] * possible, rows.__getitem__, position=1, **drawn
                )


def redrawn_deviation(num_seeds=3000):
    """One draft, verified with the noise that the engine gives it, over many seeds."""
    target = np.log([0.02, 0.22, 0.37, 0.39])  # the last is drawn too often with a draft's noise
    draft = np.log([0.66, 0.15, 0.17, 0.02])
    params, known = SamplingParams(temperature=1.0), History(token_ids=[1], num_prompt_tokens=1)
    counts = np.zeros(4)
    for seed in range(num_seeds):
        drawn = {"seed": seed, "sample_index": 0}
        proposal = propose(draft, params, known, **drawn)
        tokens, _ = verify_by_rejection(
            [proposal.token_id], [proposal], lambda _: target, position=1, **drawn
        )
        counts[tokens[0]] += 1
    return deviation(counts, np.exp(target) * num_seeds)


def test_what_is_drawn_in_a_drafts_place_has_noise_of_its_own(monkeypatch):
    """A redraw with the noise that the draft was drawn with is caught."""
    assert redrawn_deviation() < 4

    def draw_as_the_draft(row, **drawn):
        if drawn.get("stream") is NoiseStream.RESIDUAL:
            drawn["stream"] = NoiseStream.DRAFT
        return draw_row(row, **drawn)

    draw_row = rejection.draw
    monkeypatch.setattr(rejection, "draw", draw_as_the_draft)
    assert redrawn_deviation() > 5
