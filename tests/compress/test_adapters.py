"""`train-adapter`: PEFT files that the engine and peft's own layout take, and prompts given up."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.compress.folders import FUSED, SMALL, write_folder

from ridgeline import LLM
from ridgeline.cli import main
from ridgeline.compress.adapters import AdaptedModel
from ridgeline.compress.batches import WindowStream
from ridgeline.compress.context import (
    Example,
    ExampleStream,
    answer_divergence,
    context_loss,
    write_examples,
)
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.core.errors import UnsupportedModelError

RECIPE = TrainingRecipe(
    steps=8, step_tokens=256, micro_batch_tokens=128, window_tokens=64, learning_rate=5e-3
)
IDS = np.random.default_rng(0).integers(5, 4000, 3000)


def unrelated():
    return WindowStream(ids=IDS, length_tokens=64, seed=0)


def examples(number=8):
    random = np.random.default_rng(1)
    context = tuple(random.integers(5, 4000, 40).tolist())
    return [
        Example(prompted=(*context, *bare), bare=bare, answer=answer)
        for bare, answer in (
            (tuple(each[:6].tolist()), tuple(each[6:].tolist()))
            for each in random.integers(5, 4000, (number, 16))
        )
    ]


def test_an_adapter_takes_the_place_of_a_context_and_the_engine_serves_it(tmp_path):
    folder = write_folder(tmp_path / "model", SMALL)
    model = AdaptedModel(LayeredModel.open(str(folder)), 8, 0)
    seen = examples()
    loss = context_loss(model, seen, torch.float32)
    with torch.no_grad():
        before = float(answer_divergence(model.base, model.adapted, seen))
        assert before == pytest.approx(float(answer_divergence(model.base, model.base, seen)))
    stream = ExampleStream(seen, unrelated(), RECIPE.micro_batch_tokens)
    model.train(tmp_path / "adapter", {}, loss, RECIPE, stream)
    with torch.no_grad():
        after = float(answer_divergence(model.base, model.adapted, seen))
        logits = model.adapted([list(seen[0].bare)]).numpy()
    assert after < 0.7 * before
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (8, 8, 7)
    with LLM(
        str(folder),
        executor="reference",
        dtype="float32",
        adapters={"short": str(tmp_path / "adapter")},
    ) as llm:
        bare = list(seen[0].bare)
        found = llm.logits(bare, adapter="short")
        assert np.abs(found - llm.logits(bare)).max() > 1e-3
    np.testing.assert_allclose(found, logits, atol=1e-4)


def test_the_files_are_those_that_a_merge_by_hand_gives(tmp_path):
    """W + B A, as transformers' modules are named."""
    folder = write_folder(tmp_path / "model", SMALL)
    model = AdaptedModel(LayeredModel.open(str(folder)), 4, 0)
    loss = context_loss(model, examples(), torch.float32)
    model.train(tmp_path / "adapter", {}, loss, RECIPE, ExampleStream(examples(), unrelated(), 128))
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    module = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    weight = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].float()
    merged = weight + stored[f"{module}B.weight"] @ stored[f"{module}A.weight"]
    with model.adapted.layer(2) as layer:
        torch.testing.assert_close(layer.weights()["layers.1.down"].detach(), merged)


def test_batches_are_examples_each_as_often_and_a_fifth_other_text():
    stream = ExampleStream(examples(6), unrelated(), 128)
    batches = [stream.batch(number=number, num_windows=2) for number in range(30)]
    kinds = [ids.ndim for ids, _ in batches]
    assert kinds.count(2) == 6
    counts = torch.cat([ids for ids, _ in batches if ids.ndim == 1]).bincount()
    assert counts.tolist() == [8] * 6


def test_the_model_asks_and_answers_behind_its_context():
    with LLM(max_model_len=256) as llm:
        found = write_examples(
            llm, "Your name is Ada.", ["Who are you?", "What is 2 + 2?"],
            num_questions=2, answer_tokens=8, seed=0,
        )  # fmt: skip
        own = write_examples(llm, "Your name is Ada.", [], num_questions=4, answer_tokens=4, seed=0)
        text = llm.tokenizer.decode(list(found[0].prompted))
        assert "Ada" in text and "Who are you?" in text
        assert "Ada" not in llm.tokenizer.decode(list(found[0].bare))
    assert all(1 <= len(each.answer) <= 8 for each in found)
    assert 2 <= len(own) <= 4


def test_the_command_trains_and_tells_and_refuses(tmp_path, capsys):
    folder = write_folder(tmp_path / "model", SMALL)
    quick = ["--steps", "2", "--step-tokens", "128", "--micro-batch-tokens", "64",
             "--window-tokens", "64", "--rank", "2"]  # fmt: skip
    words = ["train-adapter", str(folder), "-o", str(tmp_path / "out"), *quick]
    assert main([*words, "--num-questions", "3"]) == 2
    assert "without --context" in capsys.readouterr().err
    for option in ("--keep-zeros", "--ternary"):
        assert main([*words, option]) == 2
        assert f"{option} has no effect on an adapter" in capsys.readouterr().err
    (tmp_path / "prompt.txt").write_text("You speak like a pirate.")
    (tmp_path / "asked.txt").write_text("\n".join(f"Question {n}?" for n in range(6)))
    more = ["--context", str(tmp_path / "prompt.txt"), "--questions", str(tmp_path / "asked.txt"),
            "--answer-tokens", "4"]  # fmt: skip
    assert main([*words, *more]) == 0
    assert "questions that it has not seen" in capsys.readouterr().out
    fused = write_folder(tmp_path / "fused", FUSED)
    AdaptedModel(LayeredModel.open(str(fused)), 2, 0)
    quantized = ["quantize", str(folder), "-o", str(tmp_path / "q"), "--method", "rtn"]
    assert main([*quantized, "--no-quality"]) == 0
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        AdaptedModel(LayeredModel.open(str(tmp_path / "q")), 2, 0)
