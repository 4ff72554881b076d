"""Norms against PyTorch's and transformers' own, in every shape that a family uses."""

import pytest
import torch
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from ridgeline.core.spec import NormKind, NormScope, NormSpec
from ridgeline.kernels.reference import normalise, normalise_heads

EPS = 0.02
LAYER = NormSpec(kind=NormKind.LAYER, eps=EPS)
RMS = NormSpec(kind=NormKind.RMS, eps=EPS)


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(random, gain, bias):
    x, weight = random(7, 24), random(24) if gain else None
    offset = random(24) if bias else None
    expected = functional.layer_norm(x, (24,), weight, offset, EPS)
    assert torch.allclose(normalise(x, weight, LAYER, bias=offset), expected, atol=1e-12)


def test_rms_norm(random):
    x, weight = random(7, 24), random(24)
    expected = functional.rms_norm(x, (24,), weight, EPS)
    assert torch.allclose(normalise(x, weight, RMS), expected, atol=1e-12)


def test_rms_norm_with_an_offset_weight(random):
    x, weight = random(7, 24).float(), random(24).float()
    theirs = GemmaRMSNorm(24, eps=EPS)
    theirs.weight.data = weight
    spec = NormSpec(kind=NormKind.RMS, eps=EPS, unit_offset=True)
    assert torch.allclose(normalise(x, weight, spec), theirs(x), atol=1e-6)


def test_half_precision_is_rounded_once(random):
    x, weight, bias = random(7, 24).bfloat16(), random(24).bfloat16(), random(24).bfloat16()
    expected = functional.layer_norm(x.float(), (24,), weight.float(), bias.float(), EPS)
    assert torch.equal(normalise(x, weight, LAYER, bias=bias), expected.bfloat16())


@pytest.mark.parametrize("spec", [RMS, LAYER])
def test_heads_that_share_a_gain(random, spec):
    x, weight = random(5, 4, 6), random(6)
    ours = normalise_heads(x, weight, spec, NormScope.HEAD)
    for head in range(4):
        assert torch.equal(ours[:, head], normalise(x[:, head], weight, spec))


def test_heads_with_a_gain_each(random):
    x, weight = random(5, 4, 6).float(), random(4, 6).float()
    theirs = CohereLayerNorm(hidden_size=(4, 6), eps=EPS)
    theirs.weight.data = weight
    ours = normalise_heads(x, weight, LAYER, NormScope.EACH_HEAD)
    assert torch.allclose(ours, theirs(x), atol=1e-6)


def test_all_heads_together(random):
    x, weight = random(5, 4, 6), random(24)
    ours = normalise_heads(x, weight, RMS, NormScope.PROJECTION)
    expected = functional.rms_norm(x.reshape(5, 24), (24,), weight, EPS).view(5, 4, 6)
    assert torch.allclose(ours, expected, atol=1e-12)
