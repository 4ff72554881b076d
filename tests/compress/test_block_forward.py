"""Any family as a function of its weights: the reference executor's logits, and true gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.parity.every_case import CASES, quick
from tests.parity.ours import run
from tests.tiny import EXPERTS, LATENT, SINKS, SOFTCAPPED, WINDOWED, tiny_model

from ridgeline.compress.block_forward import BlockForward, layer_ops, seeing_inputs
from ridgeline.core.cache_groups import shares_kv
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_uses
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import describe, lower
from ridgeline.weights import dummy_weights

TINY = {"windowed": WINDOWED, "experts": EXPERTS, "latent": LATENT, "sinks": SINKS,
        "softcapped": SOFTCAPPED}  # fmt: skip


def logits(model, sequences):
    """Layer by layer, as a caller that holds one layer does it."""
    x_TD = None
    for some in layer_ops(model.ops):
        forward = BlockForward(dict(model.weights), sequences, x_TD=x_TD)
        x_TD = forward.run(some)
    return forward.buffers["logits"]


def noisy(model, seed=5):
    """Gains and biases of random weights are constants, which hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: as_tensor(weight) for name, weight in model.weights.items()}
    for weight in weights.values():
        weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.05)
    return replace(model, weights=weights)


@pytest.mark.parametrize("case", quick(CASES), ids=lambda case: case.id)
def test_logits_are_the_reference_executors(case):
    if case.family == "gemma3":
        pytest.skip("a config of two parts, which transformers writes; gemma3_text is the same")
    spec = describe({"model_type": case.family, **case.config}, context=case.max_model_len).spec
    model_ops = lower(spec)
    if shares_kv(spec) or spec.layer_inputs is not None:
        pytest.skip("refused: layers are gone through one by one")
    weights = dummy_weights(model_ops, dtype="float64", seed=case.seed)
    model = noisy(ExecutorModel(spec=spec, ops=model_ops, weights=weights, dtype="float64"))
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, spec.vocab_size, length).tolist() for length in (70, 31)]
    found = logits(model, sequences)
    assert len(layer_ops(model_ops)) == len(spec.layers) + 2
    wanted = [run(model, tokens, prompt_tokens=len(tokens)) for tokens in sequences]
    np.testing.assert_allclose(found.numpy(), np.concatenate(wanted), rtol=1e-4, atol=1e-5)


def loss_of(model, weights, tokens):
    forward = BlockForward(weights, [tokens])
    forward.run(model.ops)
    return torch.nn.functional.cross_entropy(
        forward.buffers["logits"][:-1], torch.tensor(tokens[1:])
    )


@pytest.mark.parametrize("name", TINY)
def test_gradients_are_those_of_finite_differences(name):
    model = noisy(tiny_model(TINY[name]))
    tokens = np.random.default_rng(0).integers(0, 151, 24).tolist()
    weights = {key: weight.clone().requires_grad_() for key, weight in model.weights.items()}
    loss_of(model, weights, tokens).backward()
    generator, steps = torch.Generator().manual_seed(1), 0
    for key, weight in weights.items():
        if weight.grad is None:  # what only chooses among experts has none
            assert "correction" in key
            continue
        direction = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        pair = []
        for sign in (1, -1):
            moved = {**model.weights, key: model.weights[key] + sign * 1e-6 * direction}
            pair.append(loss_of(model, moved, tokens).item())
        slope = (weight.grad * direction).sum().item()
        assert (pair[0] - pair[1]) / 2e-6 == pytest.approx(slope, rel=1e-3, abs=1e-6), key
        steps += 1
    assert steps > 20


@pytest.mark.parametrize("name", TINY)
def test_inputs_of_every_matrix_are_seen(name):
    """What is seen, multiplied by the matrix, is what the model computes with."""
    model = noisy(tiny_model(TINY[name]))
    seen = {}
    with seeing_inputs(model.weights, lambda key, x: seen.setdefault(key, []).append(x)):
        BlockForward(model.weights, [range(40), range(60, 90)]).run(model.ops)
    products = {
        use.weight.name: use.is_stacked
        for op in model.ops
        for use in weight_uses(op)
        if use.role is Role.PRODUCT
    }
    for key, is_stacked in products.items():
        places = range(len(model.weights[key])) if is_stacked else [None]
        rows = [sum(map(len, seen.get((key, place), []))) for place in places]
        per_token = 2 if name in ("experts", "sinks") else 3
        assert sum(rows) == 70 * (per_token if is_stacked else 1), key
        assert all(x.shape[-1] == model.weights[key].shape[-1] for x in seen.get((key, None), []))
