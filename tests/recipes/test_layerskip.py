"""An exit that is trained is the one that is decoded with."""

from dataclasses import replace

import torch
from recipes.layerskip import logits_with_exit

from ridgeline.compress.trainable import LlamaShape, TrainableLlama

SHAPE = LlamaShape(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=4,
    num_heads=2, num_kv_heads=1, head_dim=8,
)  # fmt: skip


def model_of(shape):
    model = TrainableLlama(shape)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def test_an_exit_is_the_model_without_its_later_layers():
    model, ids = model_of(SHAPE).eval(), torch.randint(0, 31, (2, 9))
    short = TrainableLlama(replace(SHAPE, num_layers=2))
    short.load_state_dict(model.state_dict(), strict=False)
    early, last = logits_with_exit(model, ids, 2)
    torch.testing.assert_close(early, short(ids))
    torch.testing.assert_close(last, model(ids))


def test_training_leaves_out_later_layers_of_some_texts():
    model, ids = model_of(SHAPE).train(), torch.randint(0, 31, (400, 3))
    last = logits_with_exit(model, ids, 2)[-1]
    same = (last - model(ids)).abs().amax((1, 2)) < 1e-5
    # Layers 2 to 4 are kept with probabilities of 0.974, 0.941 and 0.9.
    assert 0.76 < same.float().mean() < 0.89
