"""Routing, and the products of tokens with their experts, against the reference ops."""

import pytest
import torch
from tests.kernels.triton.device import DEVICE, assert_near, random

from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    GroupLimit,
    GroupScore,
    RoutingSpec,
    Scoring,
)
from ridgeline.kernels import reference
from ridgeline.kernels.triton import (
    ExpertOrder,
    combine,
    fp8_matrix,
    grouped_linear,
    pack_matrix,
    packing,
    quantize_matrix,
    route,
    sort_by_expert,
)

SPECS = [
    RoutingSpec(top_k=2, scoring=Scoring.SOFTMAX, normalised=True),
    RoutingSpec(top_k=3, scoring=Scoring.SOFTMAX, normalised=False, scale=2.5),
    RoutingSpec(top_k=4, scoring=Scoring.SIGMOID, normalised=True, correction_bias=True,
                groups=GroupLimit(num_groups=4, top_groups=2, score=GroupScore.BEST_TWO)),
    RoutingSpec(top_k=3, scoring=Scoring.SOFTMAX, normalised=False,
                groups=GroupLimit(num_groups=3, top_groups=1, score=GroupScore.BEST)),
]  # fmt: skip


def routed(tokens, experts, spec):
    logits = random(tokens, experts) * 2
    correction = random(experts, seed=3) if spec.correction_bias else None
    chosen = torch.full((tokens, spec.top_k), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((tokens, spec.top_k), float("nan"), device=DEVICE)
    route(logits, chosen, weights, spec, correction_E=correction)
    return logits, correction, chosen, weights


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_routing(spec):
    logits, correction, chosen, weights = routed(9, 12, spec)
    expected, expected_weights = reference.route(logits, spec, correction_E=correction)
    assert torch.equal(chosen.long(), expected)
    assert_near(weights, expected_weights, torch.float32)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (24, 3, 2), (5, 12, 4)])
def test_pairs_are_sorted_by_expert(tokens, experts, top_k):
    spec = RoutingSpec(top_k=top_k, scoring=Scoring.SOFTMAX, normalised=True)
    _, _, chosen, _ = routed(tokens, experts, spec)
    order = ExpertOrder(tokens * top_k, experts, DEVICE)
    for _ in range(2):  # the buffers are used again
        sort_by_expert(chosen, order)
    count = int(order.num_blocks)
    assert count <= order.most_blocks
    found = {}
    for block in range(count):
        part = order.pairs[block * order.block_pairs : (block + 1) * order.block_pairs].tolist()
        real = [pair for pair in part if pair < order.num_pairs]
        assert real
        assert part[len(real) :] == [order.num_pairs] * (len(part) - len(real))
        found.setdefault(int(order.block_experts[block]), []).extend(real)
    flat = chosen.flatten().tolist()
    expected = {
        expert: [pair for pair, own in enumerate(flat) if own == expert] for expert in set(flat)
    }
    assert found == expected
    with pytest.raises(ValueError, match="pairs"):
        sort_by_expert(chosen[:, :1], order)


def stacks(dtype, experts, width, hidden):
    """Gate with the other branch, and down, as matrices and as the floats that they stand for."""
    both = random(experts, 2 * width, hidden, scale=0.3).cpu()
    down = random(experts, hidden, width, seed=1, scale=0.3).cpu()

    def float_of(packed):
        if packed.scales is None:
            return packed.codes.float()
        codes = packed.codes
        if packed.unit:
            codes = packing.unpack_nibbles(codes, packed.unit).float() - 8
        scales = packed.scales.float().mT
        return codes.float() * scales.repeat_interleave(packed.shape[-1] // scales.shape[-1], -1)

    forms = {
        "plain": lambda weight: pack_matrix(weight.to(dtype)),
        "int8": lambda weight: quantize_matrix(weight, 8),
        "int4-g32": lambda weight: quantize_matrix(weight, 4, 32),
        "fp8": fp8_matrix,
    }
    return {
        name: [(form(weight).to(DEVICE), float_of(form(weight))) for weight in (both, down)]
        for name, form in forms.items()
    }


@pytest.mark.parametrize(
    ("name", "dtype", "tokens"),
    [
        ("plain", torch.float32, 17),
        ("plain", torch.float16, 1),
        pytest.param("int8", torch.float16, 1, marks=pytest.mark.slow),
        ("int4-g32", torch.float16, 9),
        ("fp8", torch.bfloat16, 1),
    ],
)
def test_experts(name, dtype, tokens):
    experts, width, hidden, top_k = 4, 32, 64, 2
    spec = RoutingSpec(top_k=top_k, scoring=Scoring.SOFTMAX, normalised=True)
    activation = Activation.SILU if tokens == 1 else ClampedSwiGLU(alpha=1.7, limit=2.0)
    (both, both_values), (down, down_values) = stacks(dtype, experts, width, hidden)[name]
    _, _, chosen, weights = routed(tokens, experts, spec)
    x = random(tokens, hidden, dtype=dtype)
    biases = random(experts, 2 * width, seed=5), random(experts, hidden, seed=6)
    order = ExpertOrder(tokens * top_k, experts, DEVICE)
    sort_by_expert(chosen, order)
    inner = torch.full((tokens * top_k, width), float("nan"), dtype=dtype, device=DEVICE)
    pairs = torch.full((tokens * top_k, hidden), float("nan"), dtype=dtype, device=DEVICE)
    out = torch.full_like(x, float("nan"))
    grouped_linear(
        x, both, inner, order, pairs_per_row=top_k, bias_EO=biases[0], activation=activation
    )
    grouped_linear(inner, down, pairs, order, pairs_per_row=1, bias_EO=biases[1], weights_P=weights)
    combine(pairs.view(tokens, top_k, hidden), out)
    expected = reference.run_experts(
        x.double().cpu(),
        chosen.long().cpu(),
        weights.double().cpu(),
        gate_EFD=both_values[:, :width].double(),
        up_EFD=both_values[:, width:].double(),
        down_EDF=down_values.double(),
        gate_bias_EF=biases[0][:, :width].double().cpu(),
        up_bias_EF=biases[0][:, width:].double().cpu(),
        down_bias_ED=biases[1].double().cpu(),
        activation=activation,
    )
    assert_near(out, expected, dtype)
