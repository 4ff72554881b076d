"""Latent attention: both forms against ordinary attention, and sinks."""

import pytest
import torch

from ridgeline.kernels.reference import (
    absorbing_is_cheaper,
    attend,
    attend_absorbed,
    attend_plain,
    visible,
)

HEADS, LATENT, NOPE, ROPE, VALUE = 5, 16, 12, 8, 10


def random(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 40), (7, 40), (40, 40)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_plain_equals_absorbed_equals_attention_of_expanded_heads(
    tokens, context, dtype, tolerance
):
    q_SHd = random(tokens, HEADS, NOPE + ROPE, dtype=dtype)
    latent_CW = random(context, LATENT + ROPE, dtype=dtype)
    expand_HER = random(HEADS, NOPE + VALUE, LATENT, dtype=dtype) * 0.3
    positions = torch.arange(context)
    seen = visible(
        query_positions_S=positions[context - tokens :],
        key_positions_C=positions,
        drafted_SD=None,
        window=None,
    )
    forms = [
        form(q_SHd, latent_CW, expand_HER, seen, rope_dim=ROPE, scale=0.3)
        for form in (attend_plain, attend_absorbed)
    ]
    expected = torch.empty(tokens, HEADS, VALUE, dtype=dtype)
    for head in range(HEADS):
        k_CK = torch.cat([latent_CW[:, :LATENT] @ expand_HER[head, :NOPE].T,
                          latent_CW[:, LATENT:]], dim=-1)  # fmt: skip
        v_CV = latent_CW[:, :LATENT] @ expand_HER[head, NOPE:].T
        scores = (q_SHd[:, head] @ k_CK.T * 0.3).masked_fill(~seen, -torch.inf)
        expected[:, head] = scores.softmax(-1) @ v_CV
    for out in forms:
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_prefill_expands_and_decode_absorbs_at_the_widths_of_deepseek():
    widths = {"latent_dim": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
    assert absorbing_is_cheaper(num_tokens=1, context=1000, **widths)
    assert absorbing_is_cheaper(num_tokens=64, context=4096, **widths)
    assert not absorbing_is_cheaper(num_tokens=1000, context=1000, **widths)


def test_a_sink_is_a_key_whose_value_is_zero():
    q_SHd, k_CKd, v_CKd = random(3, 4, 8), random(6, 2, 8), random(6, 2, 8)
    sinks_H = random(4)
    seen = torch.ones(3, 6, dtype=torch.bool).tril(3)
    out = attend(q_SHd, k_CKd, v_CKd, seen, scale=0.5, sinks_H=sinks_H)
    for head in range(4):
        scores = (q_SHd[:, head] @ k_CKd[:, head // 2].T * 0.5).masked_fill(~seen, -torch.inf)
        scores = torch.cat([scores, sinks_H[head].expand(3, 1)], dim=1)
        values = torch.cat([v_CKd[:, head // 2], torch.zeros(1, 8, dtype=torch.float64)])
        torch.testing.assert_close(out[:, head], scores.softmax(-1) @ values)
