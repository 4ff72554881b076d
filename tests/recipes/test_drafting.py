"""What recipes of drafters measure and minimise."""

import pytest
import torch
from recipes.drafting import agreement, guessing_loss

ROWS = torch.tensor([1, 4, 6])


def distributions(num_tokens=9):
    torch.manual_seed(1)
    return torch.softmax(2 * torch.randn(3, 50, num_tokens), -1)


def test_a_drafter_agrees_wherever_its_tokens_are_the_targets():
    shares = distributions()
    token = shares.argmax(-1)
    among_rows = torch.isin(token, ROWS).float().mean().item()
    (same,), (same_drawn,) = agreement(lambda _: [(shares.log(), shares)], torch.zeros(1))
    (of_rows,), (drawn,) = agreement(
        lambda _: [(shares[..., ROWS].log(), shares)], torch.zeros(1), ROWS
    )
    assert same == same_drawn == 1.0
    assert of_rows == pytest.approx(among_rows, abs=5e-4)
    assert 0 < drawn < 1


def test_guesses_further_away_and_of_missing_tokens_weigh_less():
    shares = distributions()
    wanted, logits = shares[..., ROWS], torch.randn(3, 50, len(ROWS))
    entropy = -(wanted * torch.log_softmax(logits, -1)).sum(-1).mean()
    guesses = [(logits, shares), (logits, shares)]
    loss = guessing_loss(lambda _: guesses, ROWS)(torch.zeros(1), torch.zeros(1))
    torch.testing.assert_close(loss, 1.8 * entropy)
