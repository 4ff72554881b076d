"""`convert` of attention: what is lost is what differs, others load what they can, KV shrinks."""

import hashlib
import json

import numpy as np
import pytest
import torch
import transformers
from tests.compress.folders import BIASED, LATENT, SMALL, write_folder

from ridgeline import LLM
from ridgeline.cli import main
from ridgeline.compress import memory
from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.conversion.convert import convert
from ridgeline.compress.conversion.merging import groups_of_heads
from ridgeline.compress.conversion.recipe import ConversionRecipe
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.pruning.prune import prune
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.errors import (
    CorruptFileError,
    OutOfMemoryError,
    SettingsError,
    UnsupportedModelError,
)
from ridgeline.evaluation import QualitySum, served_log_probabilities
from ridgeline.models import describe

FULL = SMALL | {"num_key_value_heads": 4, "num_hidden_layers": 4}
TURNED = SMALL | {
    "model_type": "glm",
    "num_key_value_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
WINDOWS = {"window_tokens": 64, "num_windows": 4}
TOKENS = tuple((np.arange(120) * 37 % 4000).tolist())


def opened(folder):
    return LayeredModel.open(str(folder))


def made(folder, out, **settings):
    model = opened(folder)
    recipe = ConversionRecipe(**WINDOWS, **settings)
    text = calibration_text("embedded", model.loaded, recipe)
    return convert(model, out, recipe, text)


def distance(path, reference):
    total = QualitySum()
    for (tokens, wanted), (_, found) in zip(
        opened(reference).log_probabilities([TOKENS]), opened(path).log_probabilities([TOKENS]),
        strict=True,
    ):  # fmt: skip
        total.add(tokens, found, wanted)
    return total.quality().kl


def logits_of(path):
    """By transformers, float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([TOKENS])).logits[0], -1).numpy()


def ours(path):
    ((_, found),) = opened(path).log_probabilities([TOKENS])
    return found


def alike(config, of_head, seed=0):
    """A change of random weights: KV head h is head ``of_head[h]``, turned: pairs of K by angles of
    its own, V by a matrix."""
    heads, width = config["num_key_value_heads"], config.get("head_dim", 16)
    generator = torch.Generator().manual_seed(seed)
    rotary = int(width * config.get("partial_rotary_factor", 1.0))
    pairs = torch.arange(rotary).view(-1, 2) if config["model_type"] == "glm" else (
        torch.arange(rotary).view(2, -1).T
    )  # fmt: skip

    def turn(name):
        if name == "v":
            return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        found = torch.eye(width)
        found[rotary:, rotary:] = torch.linalg.qr(
            torch.randn(width - rotary, width - rotary, generator=generator)
        )[0]
        for a, b in pairs.tolist():
            angle = torch.rand((), generator=generator) * 6.28
            found[a, a] = found[b, b] = angle.cos()
            found[a, b], found[b, a] = -angle.sin(), angle.sin()
        return found

    def change(weights):
        for name, weight in weights.items():
            if name.endswith("_bias"):
                weight.normal_(generator=generator)
        for name in [each for each in weights if each.split(".")[-1] in ("k", "v")]:
            turns = [turn(name[-1]) for _ in range(heads)]
            for each in (name, f"{name}_bias"):
                if each in weights:
                    parts = weights[each].unflatten(0, (heads, width))
                    parts.copy_(
                        torch.stack([turns[h] @ parts[of_head[h]].clone() for h in range(heads)])
                    )

    return change


@pytest.mark.parametrize(
    ("config", "of_head", "left"),
    [
        (SMALL, (0, 0), 1),
        (FULL, (0, 1, 0, 1), 2),
        (BIASED | {"num_key_value_heads": 4}, (0, 1, 1, 0), 2),
        (TURNED, (0, 0, 1, 1), 2),
    ],
    ids=["llama", "llama, groups apart", "qwen2 with biases", "glm, partly rotated"],
)
def test_heads_that_are_one_but_for_a_rotation_become_one_without_loss(
    config, of_head, left, tmp_path
):
    """Whichever they are, and however they lie; the mean of them as they are loses almost all."""
    folder = write_folder(tmp_path / "model", config, change=alike(config, of_head))
    lost = {}
    for merge in ("principal", "aligned", "mean", "first"):
        report = made(folder, tmp_path / merge, kv_heads=left, merge=merge)
        lost[merge] = distance(tmp_path / merge, folder)
        assert (
            report.kv_elements * config["num_key_value_heads"] == report.kv_elements_before * left
        )
    assert max(lost["principal"], lost["aligned"]) < 0.02 * min(lost["mean"], lost["first"])


def test_heads_are_grouped_by_what_is_alike():
    likeness = torch.eye(6)
    for a, b in ((0, 4), (1, 2), (3, 5)):
        likeness[a, b] = likeness[b, a] = 1.0
    assert sorted(groups_of_heads(likeness, 3)) == [[0, 4], [1, 2], [3, 5]]


@pytest.mark.parametrize(
    ("config", "settings", "model_type"),
    [
        (FULL, {"kv_heads": 2}, "llama"),
        (FULL, {"window": 24}, "mistral"),
        (FULL, {"window": 24, "full_every": 2, "kv_heads": 1}, "ministral"),
        (BIASED, {"window": 24, "full_every": 2}, "qwen2"),
    ],
    ids=lambda value: str(value.get("model_type", value)) if isinstance(value, dict) else value,
)
def test_transformers_computes_what_we_do_from_what_it_can_load(
    config, settings, model_type, tmp_path
):
    folder = write_folder(tmp_path / "model", config)
    made(folder, tmp_path / "out", **settings)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == model_type
    found = ours(tmp_path / "out")
    assert np.abs(found - logits_of(tmp_path / "out")).max() < 1e-3
    assert np.abs(found - ours(folder)).max() > 0.01


@pytest.mark.parametrize("full_every", [0, 2])
def test_what_a_llama_leaves_out_is_said_where_others_have_another_default(
    full_every, tmp_path, caplog
):
    """Nothing is warned of either: no config that was tried is the user's."""
    config = {**FULL, "num_attention_heads": 2, "num_key_value_heads": 2}
    del config["num_key_value_heads"], config["max_position_embeddings"]
    folder = write_folder(tmp_path / "model", config)
    convert(
        opened(folder), tmp_path / "out", ConversionRecipe(window=24, full_every=full_every), None
    )
    assert np.abs(ours(tmp_path / "out") - logits_of(tmp_path / "out")).max() < 1e-3
    assert not caplog.records


def test_layers_that_share_kv_are_fitted_and_served_and_refused_by_others_by_name(tmp_path):
    folder = write_folder(tmp_path / "model", FULL)
    report = made(folder, tmp_path / "out", share=2)
    assert report.kv_elements * 2 == report.kv_elements_before
    made(folder, tmp_path / "as-it-is", share=2, merge="mean")
    assert distance(tmp_path / "out", folder) < 0.9 * distance(tmp_path / "as-it-is", folder)
    with LLM(str(tmp_path / "out"), dtype="float32") as llm:
        ((_, served),) = served_log_probabilities(llm, [TOKENS])
    assert np.abs(served - ours(tmp_path / "out")).max() < 1e-2
    with pytest.raises(ValueError, match="ridgeline_shared_kv"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    quantize(opened(tmp_path / "out"), tmp_path / "int4", Recipe(method="rtn"), None)
    assert distance(tmp_path / "int4", tmp_path / "out") < distance(tmp_path / "out", folder)
    with pytest.raises(UnsupportedModelError, match="it is not pruned"):
        prune(opened(tmp_path / "out"), tmp_path / "cut", PruneRecipe(method="magnitude"), None)
    with pytest.raises(UnsupportedModelError, match="share their KV already"):
        made(tmp_path / "out", tmp_path / "twice", share=2)


@pytest.mark.parametrize(
    ("settings", "share"),
    [({"kv_heads": 1}, 1 / 4), ({"share": 4}, 1 / 4), ({"kv_heads": 2, "share": 2}, 1 / 4)],
)
def test_the_engine_keeps_as_much_as_the_formula_says(settings, share, tmp_path):
    folder = write_folder(tmp_path / "model", FULL)
    made(folder, tmp_path / "out", **settings)
    sizes = []
    for path in (folder, tmp_path / "out"):
        with LLM(str(path), dtype="float32", max_num_seqs=2, max_model_len=64) as llm:
            sizes.append(llm.config.kv_cache_bytes)
    assert sizes[1] == share * sizes[0]


def test_the_memory_that_is_told_is_that_of_the_layers_that_are_converted_together(
    tmp_path, monkeypatch
):
    model, needs = opened(write_folder(tmp_path / "model", FULL)), []
    for settings in ({"kv_heads": 2}, {"share": 4}):
        recipe = ConversionRecipe(**WINDOWS, **settings)
        text = calibration_text("embedded", model.loaded, recipe)
        convert(
            model, tmp_path / f"{len(needs)}", recipe, text,
            announce=lambda need: needs.append(need.layer_bytes),
        )  # fmt: skip
    layer = model.num_bytes(1)
    assert needs[1] - needs[0] == 3 * layer
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: layer)
    with pytest.raises(OutOfMemoryError, match="and share 1 takes least"):
        convert(model, tmp_path / "out", recipe, text)
    assert not (tmp_path / "out").exists()


def test_a_window_bounds_what_is_kept(tmp_path):
    folder = write_folder(tmp_path / "model", FULL)
    made(folder, tmp_path / "out", window=24, full_every=4)
    groups = kv_groups(opened(tmp_path / "out").loaded.definition.spec)
    assert [(group.layers, group.window) for group in groups] == [((0, 1, 2), 24), ((3,), None)]


def test_an_interrupted_conversion_goes_on_to_the_same_bytes(tmp_path):
    folder = write_folder(tmp_path / "model", FULL)
    made(folder, tmp_path / "whole", kv_heads=2)
    model, recipe = opened(folder), ConversionRecipe(**WINDOWS, kv_heads=2)
    text = calibration_text("embedded", model.loaded, recipe)

    def stop(layer, *_):
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, tmp_path / "out", recipe, text, progress=stop)
    assert not (tmp_path / "out/config.json").exists()
    convert(model, tmp_path / "out", recipe, text, resume=True)
    digests = [
        hashlib.sha256(
            b"".join(f.read_bytes() for f in sorted((tmp_path / n).glob("*.*")))
        ).digest()
        for n in ("whole", "out")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("config", "settings", "what"),
    [
        (SMALL | {"model_type": "qwen3"}, {"kv_heads": 1}, "Layer 0 has norms on its heads"),
        (LATENT, {"window": 24}, "Layer 0 has no attention of heads"),
        (SMALL, {"kv_heads": 3}, "must be a divisor of the 2 KV heads"),
        (SMALL | {"model_type": "stablelm"}, {"window": 24}, "No config of stablelm"),
        (SMALL | {"model_type": "stablelm"}, {"share": 2}, "No config of stablelm"),
        (SMALL, {"share": 2, "window": 24, "full_every": 2}, "they share no KV"),
        (SMALL, {"kv_heads": 2, "window": 24}, "All layers have 2 KV heads: leave kv_heads out"),
        (SMALL, {"window": SMALL["max_position_embeddings"]}, "hides nothing of a context of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_made_is_refused_by_name(config, settings, what, tmp_path):
    folder = write_folder(tmp_path / "model", config)
    with pytest.raises((UnsupportedModelError, SettingsError), match=what):
        made(folder, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"base_model_type": "qwen3"}, "base_model_type 'qwen3'; supported are llama"),
        ({"kv_layers": [-1, 0]}, "needs kv_layers for 4 layers"),
        ({"kv_layers": [-1, 2, -1, -1]}, "layer 1 read K and V of layer 2"),
        ({"kv_layers": [-1, 0, 1, -1]}, "layer 2 read K and V of layer 1"),
    ],
)
def test_a_config_that_shares_what_is_not_there_is_refused(changed, what):
    config = FULL | {"model_type": "ridgeline_shared_kv", "base_model_type": "llama"}
    with pytest.raises((CorruptFileError, UnsupportedModelError), match=what):
        describe(config | {"kv_layers": [-1, 0, -1, 2]} | changed)


def test_the_command_converts_measures_and_refuses_what_has_no_effect(tmp_path, capsys):
    folder = write_folder(tmp_path / "model", FULL)
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"text": "def f(x):\n    return x + 1\n"}))
    words = ["convert", str(folder), "-o", str(tmp_path / "out"), "--text", str(held)]
    assert main([*words, "--kv-heads", "2", "--num-windows", "2"]) == 0
    told = capsys.readouterr().out
    assert "K and V of a token have 256 elements, of 512. Heal it: ridgeline distill" in told
    assert "weights alone, float32" in told
    for more, what in (
        ([], "--text goes with --kv-heads"),
        (["--num-windows", "2"], "Nothing is converted"),
        (["--window", "8", "--calibration", str(held)], "change no weight"),
        (["--window", "8", "--merge", "mean"], "--merge has no effect on windows"),
        (["--window", "8", "--num-windows", "2"], "--num-windows has no effect on windows"),
        (["--window", "8", "--dtype", "float16"], "--dtype does not go with another attention"),
    ):
        assert main([*words, *more]) == 2
        assert what in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "o.gguf"), "--window", "8"]) == 2
    assert "convert that to GGUF then" in capsys.readouterr().err
