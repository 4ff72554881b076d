"""Trained heads are what Medusa's files say."""

import torch
from recipes.medusa import Heads
from tests.medusa import head_logits


def test_what_is_trained_computes_what_its_file_says():
    torch.manual_seed(0)
    heads = Heads(2, torch.randn(31, 12))
    with torch.no_grad():
        for weight in heads.weights.values():
            weight += 0.3 * torch.randn_like(weight)
        hidden = torch.randn(2, 5, 12)
        for number, logits in enumerate(heads(hidden)):
            wanted = head_logits(heads.tensors(), number, hidden)
            torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
