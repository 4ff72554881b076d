"""The exported target lies between the weights that training began with and those it ended with."""

from dataclasses import replace
from pathlib import Path

import torch
from recipes.embedded import export, recipe

import ridgeline
from ridgeline.compress.optimizer import MuonAdam, OptimizerConfig
from ridgeline.compress.pretrain import save_checkpoint
from ridgeline.compress.trainable import LlamaShape, TrainableLlama

TOKENIZER = Path(ridgeline.__file__).parent / "assets" / "target"
SHAPE = LlamaShape(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def test_target_is_an_average_with_what_it_began_with(tmp_path: Path) -> None:
    before, trained = (
        TrainableLlama(SHAPE, seed=1).bfloat16().float(),
        TrainableLlama(SHAPE, seed=2),
    )
    export.export_model(model=before, tokenizer=TOKENIZER, folder=tmp_path / "start")
    (tmp_path / "target").mkdir()
    optimizer = MuonAdam(trained, OptimizerConfig())
    save_checkpoint(
        folder=tmp_path / "target", model=trained, optimizer=optimizer, step=1, seconds=0.0
    )
    options = replace(recipe.FURTHER, target=SHAPE, trained_share=0.75)
    made = recipe.load_target(tmp_path, options, tmp_path / "start").state_dict()
    alone = recipe.load_target(tmp_path, options).state_dict()
    for name, weights in trained.state_dict().items():
        expected = 0.25 * before.state_dict()[name] + 0.75 * weights
        torch.testing.assert_close(made[name], expected)
        assert torch.equal(alone[name], weights)
