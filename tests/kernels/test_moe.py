"""Routing, and experts against a loop over every token and every expert."""

import pytest
import torch

from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    GroupLimit,
    GroupScore,
    RoutingSpec,
    Scoring,
)
from ridgeline.kernels.reference import activate, route, run_experts

TOKENS, EXPERTS, HIDDEN, WIDTH = 23, 8, 12, 10
CLAMPED = ClampedSwiGLU(alpha=1.7, limit=0.8)


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def dense_loop(h_TD, experts_Tk, weights_Tk, weights, biases, activation):
    out = torch.zeros_like(h_TD)
    for token in range(len(h_TD)):
        for expert in range(EXPERTS):
            gate, up, down = (weight[expert] for weight in weights)
            gate_bias, up_bias, down_bias = (bias[expert] for bias in biases)
            g, u = gate @ h_TD[token] + gate_bias, up @ h_TD[token] + up_bias
            if activation is CLAMPED:
                g, u = g.clamp(max=0.8), u.clamp(-0.8, 0.8)
                inner = (u + 1) * g / (1 + torch.exp(-1.7 * g))
            else:
                inner = activate(g, activation) * u
            weight = weights_Tk[token][experts_Tk[token] == expert].sum()
            out[token] += weight * (down @ inner + down_bias)
    return out


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU, CLAMPED])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_equal_a_dense_loop(activation, biased):
    h_TD = random(TOKENS, HIDDEN)
    weights = [random(EXPERTS, WIDTH, HIDDEN, seed=s) for s in (1, 2)]
    weights.append(random(EXPERTS, HIDDEN, WIDTH, seed=3))
    shapes = [(EXPERTS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, HIDDEN)]
    biases = [random(*shape, seed=s) * biased for s, shape in enumerate(shapes)]
    spec = RoutingSpec(top_k=3, scoring=Scoring.SOFTMAX, normalised=False)
    experts_Tk, weights_Tk = route(random(TOKENS, EXPERTS, seed=9) * 2, spec)
    out = run_experts(
        h_TD,
        experts_Tk,
        weights_Tk,
        gate_EFD=weights[0],
        up_EFD=weights[1],
        down_EDF=weights[2],
        gate_bias_EF=biases[0] if biased else None,
        up_bias_EF=biases[1] if biased else None,
        down_bias_ED=biases[2] if biased else None,
        activation=activation,
    )
    expected = dense_loop(h_TD, experts_Tk, weights_Tk, weights, biases, activation)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_experts_without_tokens_are_not_read():
    h_TD = random(TOKENS, HIDDEN)
    weights = [random(EXPERTS, WIDTH, HIDDEN), random(EXPERTS, WIDTH, HIDDEN)]
    weights.append(random(EXPERTS, HIDDEN, WIDTH))
    for weight in weights:
        weight[2] = float("nan")
    experts_Tk = torch.tensor([[0, 1], [3, 4], [5, 6]]).repeat(TOKENS // 3 + 1, 1)[:TOKENS]
    out = run_experts(
        h_TD,
        experts_Tk,
        torch.ones(TOKENS, 2, dtype=torch.float64),
        gate_EFD=weights[0],
        up_EFD=weights[1],
        down_EDF=weights[2],
        activation=Activation.SILU,
    )
    assert out.isfinite().all()


def test_softmax_of_the_chosen_is_normalised_softmax_of_all():
    logits_TE = random(TOKENS, EXPERTS) * 3
    spec = RoutingSpec(top_k=3, scoring=Scoring.SOFTMAX, normalised=True, scale=2.5)
    experts_Tk, weights_Tk = route(logits_TE, spec)
    chosen = logits_TE.topk(3, dim=-1)
    assert torch.equal(experts_Tk, chosen.indices)
    torch.testing.assert_close(weights_Tk, chosen.values.softmax(-1) * 2.5)


def test_correction_changes_the_choice_but_not_the_weights():
    logits_TE = random(TOKENS, EXPERTS)
    spec = RoutingSpec(top_k=2, scoring=Scoring.SIGMOID, normalised=False, correction_bias=True)
    correction_E = torch.zeros(EXPERTS, dtype=torch.float64)
    correction_E[5] = 10.0
    experts_Tk, weights_Tk = route(logits_TE, spec, correction_E=correction_E)
    assert (experts_Tk[:, 0] == 5).all()
    assert torch.equal(weights_Tk, logits_TE.sigmoid().gather(1, experts_Tk))


@pytest.mark.parametrize(
    ("score", "expected"),
    [(GroupScore.BEST, {0, 1}), (GroupScore.BEST_TWO, {2, 3})],
)
def test_groups_are_ranked_by_their_best_or_their_best_two(score, expected):
    """Experts 0 and 1 are a group with the best expert; 2 and 3 one with the best pair."""
    logits_TE = torch.tensor([[3.0, -3.0, 1.5, 1.4, -1.0, -1.0]], dtype=torch.float64)
    spec = RoutingSpec(
        top_k=2,
        scoring=Scoring.SIGMOID,
        normalised=False,
        groups=GroupLimit(num_groups=3, top_groups=1, score=score),
    )
    experts_Tk, _ = route(logits_TE, spec)
    assert set(experts_Tk[0].tolist()) == expected
