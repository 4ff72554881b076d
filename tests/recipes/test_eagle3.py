"""Training-time test is what a drafter does when it drafts."""

import torch
from recipes.eagle3 import FEATURE_LAYERS, Drafter
from tests import eagle3
from tests.tiny import CONFIG


def test_each_step_of_training_computes_what_a_drafter_computes():
    config = eagle3.head_config(CONFIG, feature_layers=FEATURE_LAYERS)
    torch.manual_seed(0)
    trained = Drafter(config)
    tensors = trained.tensors() | {"d2t": torch.zeros(config["draft_vocab_size"])}
    embedding = torch.randn(config["vocab_size"], config["hidden_size"])
    features = torch.randn(7, tensors["fc.weight"].shape[1])
    tokens = torch.randint(0, config["vocab_size"], (7,)).tolist()
    with torch.no_grad():
        steps = trained(embedding[tokens][None], features[None], 3)
        plain = eagle3.Drafter(config, tensors, embedding)
        for row in range(5):  # row t of step s has the token at t + s
            states = plain.project(features[: row + 1])
            for step in range(3):
                logits, own = plain.logits(tokens[: row + 1 + step], states)
                torch.testing.assert_close(steps[step][0, row], logits[-1], atol=1e-4, rtol=0)
                states = torch.cat([states, own[-1:]])
