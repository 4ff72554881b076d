"""Every configuration that the search may try computes the same product."""

import pytest
import torch
from tests.kernels.triton.device import DEVICE, assert_near, random

from ridgeline.core.spec import Activation
from ridgeline.kernels.triton import (
    NUM_AXES,
    LinearCall,
    LinearConfigs,
    LinearUse,
    Workspace,
    batch_class,
    fp8_matrix,
    neighbours,
    pack_matrix,
    quantize_matrix,
)

FORMATS = {
    "plain": pack_matrix,
    "int4": lambda weight: quantize_matrix(weight, 4, 32),
    "int8 by rows": lambda weight: quantize_matrix(weight, 8),
    "fp8": fp8_matrix,
}


def use_of(name, *, tokens, gated=False, residual=False, rows=64, columns=256):
    weight = random(rows, columns, seed=3, scale=0.1)
    call = LinearCall(
        matrix=FORMATS[name](weight).to(DEVICE),
        bias_O=None,
        activation=Activation.SILU if gated else None,
        has_residual=residual,
    )
    use = LinearUse(tokens=tokens, dtype=torch.float32, workspace=Workspace(DEVICE))
    use.calls.append(call)
    return use


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "settings",
    [{"tokens": 3, "gated": True}, {"tokens": 20, "residual": True}],
    ids=["gated", "residual"],
)
def test_every_configuration_computes_the_same(name, settings):
    use = use_of(name, **settings)
    runner, guess = use.runner(), use.guess()
    runner.run(guess)
    expected = runner.out_TO.clone()
    assert expected.norm() > 0
    tried = {guess}
    for axis in range(NUM_AXES):
        found = neighbours(use, guess, axis)
        assert found
        for config in found:
            assert config not in tried
            tried.add(config)
            runner.out_TO.zero_()
            runner.run(config)
            assert_near(runner.out_TO, expected, torch.float32)
    assert len(tried) <= 14


def test_a_use_has_all_calls_that_share_a_configuration():
    configs, workspace = LinearConfigs(), Workspace(DEVICE)
    x = random(5, 256)
    first, second = (use_of("int4", tokens=5, gated=True).calls[0] for _ in range(2))
    other = use_of("plain", tokens=5).calls[0]
    with configs.watched() as uses:
        for call in (first, second, other):
            assert configs.get(x, call, workspace) is None
    configs.get(x, first, workspace)  # nobody watches
    (pair, one) = uses
    assert uses[pair].calls == [first, second]
    assert uses[one].calls == [other]
    assert uses[pair].num_bytes == 2 * first.matrix.num_bytes
    assert (pair.format, pair.gated, pair.tokens) == ("int4", True, 16)
    config = uses[pair].guess()
    configs.add(pair, config)
    assert configs.get(random(16, 256), second, workspace) is config
    assert configs.get(random(17, 256), second, workspace) is None
    assert configs.get(x.half(), second, workspace) is None


def test_a_runner_has_no_more_matrices_than_caches_hold(monkeypatch):
    use = use_of("plain", tokens=1)
    use.calls *= 10
    assert len(use.runner().calls) == 10
    monkeypatch.setattr("ridgeline.kernels.triton.tuning._COLD_BYTES", 3 * 64 * 256 * 4)
    assert len(use.runner().calls) == 3


def test_batches_are_in_classes():
    assert [batch_class(n) for n in (1, 16, 17, 32, 33, 64, 65, 256)] == [
        16, 16, 32, 32, 64, 64, 128, 128,
    ]  # fmt: skip
