"""`quantize` on folders of several families: what is written, read back and refused."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.compress.folders import BIASED, EXPERTS, FUSED, LATENT, SMALL, write_folder
from tests.parity.new_dense_cases import NEW_DENSE_CASES

from ridgeline import LLM
from ridgeline.compress.block_forward import layer_ops
from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.memory import memory_need
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tensors import products
from ridgeline.core.errors import (
    CorruptFileError,
    InvalidRequestError,
    OutOfMemoryError,
    SettingsError,
    UnsupportedModelError,
)
from ridgeline.executors.cpu.codes import matrix_codes
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.kernels.tensors import as_array, as_tensor
from ridgeline.models import PRESETS, describe, lower
from ridgeline.quant import QuantizedTensor
from ridgeline.weights.conversion import convert_to_safetensors

FAMILIES = {
    "llama": SMALL,
    "tied head": SMALL | {"tie_word_embeddings": True},
    "qwen2": BIASED,
    "phi3": FUSED,
    "mixtral": EXPERTS,
    "deepseek": LATENT,
}


def text_of(model, *, source="embedded", windows=8, tokens=64):
    recipe = Recipe(window_tokens=tokens, num_windows=windows)
    return calibration_text(source, model.loaded, recipe)


def made(folder, out, recipe=None, **options):
    model = LayeredModel.open(str(folder))
    recipe = recipe or Recipe()
    return quantize(model, out, recipe, text_of(model) if recipe.is_calibrated else None, **options)


def digests(folder):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.is_file()
    }


def stored(folder):
    return dict(LayeredModel.open(str(folder)).stored.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantized_read_back_and_run(family, tmp_path):
    """The matrices of the layers have the codes' values; everything else has its own bytes."""
    folder = write_folder(tmp_path / "model", FAMILIES[family])
    report = made(folder, tmp_path / "out")
    assert not report.left
    assert 0 < report.error_ratio < 0.9
    before, after = stored(folder), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    kinds = {}
    for name, weight in before.items():
        found = after[name]
        if isinstance(found, np.ndarray):
            assert np.array_equal(found, weight), name
            continue
        kinds[name.split(".")[-1]] = found
        relative = np.linalg.norm(found.dequantize("float32") - weight) / np.linalg.norm(weight)
        assert 0.02 < relative < 0.2, name
    assert len(kinds) >= 7
    tokens = list(range(5, 60))
    with (
        LLM(str(folder), executor="reference", dtype="float32") as plain,
        LLM(str(tmp_path / "out"), executor="reference", dtype="float32") as small,
    ):
        wanted, found = plain.logits(tokens), small.logits(tokens)
    assert 0 < np.abs(found - wanted).mean() < 0.6 * np.abs(wanted).mean()


@pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_file_runs_with_factors(bits, tmp_path):
    folder = write_folder(
        tmp_path / "model", SMALL | {"hidden_size": 128, "intermediate_size": 256}
    )
    made(folder, tmp_path / "out", Recipe(bits=bits))
    matrices = [w for w in stored(tmp_path / "out").values() if isinstance(w, QuantizedTensor)]
    forms = [matrix_codes(matrix).form for matrix in matrices]
    assert len(forms) == 21
    assert all(form.has_factors and form.format.bits == bits for form in forms)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(format="gptq"),
        Recipe(format="gptq", bits=8, group_size=0, method="rtn"),
        Recipe(format="gptq", bits=3, symmetric=False),
        Recipe(bits=2),
        Recipe(bits=3),
        Recipe(bits=5, group_size=64, method="rtn"),
        Recipe(bits=4, symmetric=False),
        Recipe(bits=8, group_size=0, method="rtn"),
    ],
    ids=lambda recipe: f"{recipe.format}-{recipe.bits}-{recipe.group_size}-{recipe.symmetric}",
)
def test_every_format_holds_what_was_rounded(recipe, tmp_path, monkeypatch):
    """Values read from the file are those that later layers were calibrated with."""
    from ridgeline.compress import quantize as module

    rounded = {}
    for name in ("round_gptq", "round_nearest"):
        plain = getattr(module, name)

        def kept(weight, *arguments, plain=plain, **options):
            found = plain(weight, *arguments, **options)
            rounded[len(rounded)] = found.values_OI.clone()
            return found

        monkeypatch.setattr(module, name, kept)
    folder = write_folder(tmp_path / "model")
    made(folder, tmp_path / "out", recipe)
    matrices = [w for w in stored(tmp_path / "out").values() if isinstance(w, QuantizedTensor)]
    found = sorted(
        (as_tensor(w.dequantize("float32")) for w in matrices), key=lambda w: float(w.sum())
    )
    wanted = sorted(rounded.values(), key=lambda w: float(w.sum()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_one_seed_gives_one_file_and_rtn_needs_no_text(tmp_path):
    folder = write_folder(tmp_path / "model")
    for name in ("a", "b"):
        made(folder, tmp_path / name)
        made(folder, tmp_path / f"rtn-{name}", Recipe(method="rtn"))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "rtn-a") == digests(tmp_path / "rtn-b")
    assert digests(tmp_path / "a") != digests(tmp_path / "rtn-a")


def test_no_random_state_is_touched(tmp_path):
    folder = write_folder(tmp_path / "model")
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    made(folder, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path):
    folder = write_folder(tmp_path / "model", SMALL | {"num_hidden_layers": 6})
    words = [sys.executable, "-m", "tests.compress.kill_worker", folder, tmp_path, "6", "7"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["kills"] == 6
    assert figures["failures"] == 0, done.stderr
    wanted = digests(tmp_path / "whole")
    for number in range(figures["folders"]):
        assert digests(tmp_path / f"killed-{number}") == wanted
        assert not (tmp_path / f"killed-{number}" / ".ridgeline-state").exists()


def test_a_folder_that_exists_is_not_touched(tmp_path):
    folder, out = write_folder(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(SettingsError, match="exists already"):
        made(folder, out)
    with pytest.raises(SettingsError, match="not what an earlier run left"):
        made(folder, out, resume=True)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]


def test_what_was_begun_otherwise_is_not_gone_on_with(tmp_path):
    folder, out = write_folder(tmp_path / "model"), tmp_path / "out"
    made(folder, out)
    with pytest.raises(SettingsError, match="recipe differ"):
        made(folder, out, Recipe(seed=1), resume=True)
    other = write_folder(tmp_path / "other", seed=1)
    with pytest.raises(SettingsError, match="model differ"):
        made(other, out, resume=True)
    before = digests(out)
    assert made(folder, out, resume=True).error_ratio > 0  # it is done already
    assert digests(out) == before
    assert not (out / ".ridgeline-state").exists()
    (out / "config.json").unlink()
    shard = out / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptFileError, match="00002"):
        made(folder, out, resume=True)


def test_quantized_models_are_refused_until_they_are_expanded(tmp_path):
    folder = write_folder(tmp_path / "model")
    made(folder, tmp_path / "once")
    with pytest.raises(UnsupportedModelError, match=r"quantized already.*convert .* expands it"):
        made(tmp_path / "once", tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    convert_to_safetensors(tmp_path / "once", tmp_path / "floats", "float32")
    made(tmp_path / "floats", tmp_path / "again", Recipe(method="rtn"))
    for name, once in stored(tmp_path / "once").items():
        again = stored(tmp_path / "again")[name]
        assert isinstance(once, QuantizedTensor) == isinstance(again, QuantizedTensor), name


@pytest.mark.parametrize("num_shared", [0, 2])
def test_layers_that_read_what_others_made_are_refused(num_shared, tmp_path):
    (case,) = (each for each in NEW_DENSE_CASES if each.id == "gemma4_text-layer-inputs")
    config = case.config | {"model_type": "gemma4_text", "num_kv_shared_layers": num_shared}
    with pytest.raises(UnsupportedModelError, match="not calibrated layer by layer"):
        made(write_folder(tmp_path / "model", config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["out", "out.gguf"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("weight", "tensor"),
    [
        ("layers.1.up", r"layers\.1\.mlp\.up_proj\.weight"),
        ("layers.1.attention_norm", r"layers\.1\.input_layernorm\.weight"),
        ("embed", r"embed_tokens\.weight"),
        ("head", r"lm_head\.weight"),
        ("final_norm", r"model\.norm\.weight"),
    ],
)
def test_weights_that_are_not_finite_are_named(weight, tensor, value, out, tmp_path):
    """Norms and embeddings as well, before anything is computed with them."""

    def spoil(weights):
        weights[weight].view(-1)[-3] = value

    folder = write_folder(tmp_path / "model", change=spoil)
    recipe = Recipe(method="rtn", format="gguf" if "." in out else "compressed-tensors")
    with pytest.raises(CorruptFileError, match=tensor):
        made(folder, tmp_path / out, recipe)
    assert not (tmp_path / out / "config.json").exists()


def test_rows_that_are_no_whole_groups_stay_and_the_config_says_so(tmp_path):
    folder = write_folder(tmp_path / "model", SMALL | {"intermediate_size": 80})
    report = made(folder, tmp_path / "out")
    assert set(report.left) == {f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)}
    assert "80 columns" in next(iter(report.left.values()))
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model.layers.2.mlp.down_proj" in ignored["quantization_config"]["ignore"]
    assert isinstance(stored(tmp_path / "out")["layers.0.down"], np.ndarray)
    with pytest.raises(UnsupportedModelError, match="no whole groups"):
        made(folder, tmp_path / "none", Recipe(group_size=512))


@pytest.mark.parametrize(
    ("config", "left", "others"),
    [
        (
            {"intermediate_size": 80},
            ["model.layers.1.mlp.down_proj"],
            ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.down_proj"],
        ),
        (
            {"hidden_size": 80},
            [f"model.layers.1.self_attn.{name}" for name in ("q_proj", "qkv_proj")]
            + [f"model.layers.1.mlp.{name}" for name in ("up_proj", "gate_up_proj")],
            ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.o_proj"],
        ),
    ],
)
def test_what_gptq_files_left_is_named_as_other_engines_read_it(config, left, others, tmp_path):
    """By vLLM's rule (``get_dynamic_override``): a negative pattern matches the layer's name."""
    config = {"hidden_size": 64, "head_dim": 16} | config
    folder = write_folder(tmp_path / "model", SMALL | config)
    made(folder, tmp_path / "out", Recipe(format="gptq", method="rtn"))
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]

    def is_left(layer):
        return any(re.match(rule.removeprefix("-:"), layer) for rule in found["dynamic"])

    assert all(rule.startswith("-:") for rule in found["dynamic"])
    assert all(map(is_left, left))
    assert not any(map(is_left, others))
    assert len(stored(tmp_path / "out")) == len(stored(folder))


def test_experts_that_no_token_reaches_are_quantized_by_what_all_saw(tmp_path):
    def silence(weights):
        for layer in range(3):
            router = weights[f"layers.{layer}.router"]
            router[1] = -router[0]
            router[2:] = 0  # is never above both of the others

    config = EXPERTS | {"num_experts_per_tok": 1}
    folder = write_folder(tmp_path / "model", config, change=silence)
    report = made(folder, tmp_path / "out")
    unseen = [name for name, note in report.notes.items() if note.get("unseen")]
    assert len(unseen) == 3 * 2 * 3  # layers, experts and matrices of an expert
    stacks = [weight for weight in stored(tmp_path / "out").values() if len(weight.shape) == 3]
    assert len(stacks) == 9
    assert all(isinstance(stack, QuantizedTensor) for stack in stacks)


def test_one_token_of_text_is_enough_and_none_is_an_error(tmp_path):
    folder = write_folder(tmp_path / "model")
    model = LayeredModel.open(str(folder))
    (tmp_path / "short.txt").write_text("def f")
    (tmp_path / "empty.txt").write_text("")
    short = text_of(model, source=str(tmp_path / "short.txt"))
    assert short.num_tokens <= 4
    report = quantize(model, tmp_path / "out", Recipe(), short)
    assert report.error_ratio <= 1
    with pytest.raises(InvalidRequestError, match="no two tokens"):
        text_of(model, source=str(tmp_path / "empty.txt"))


def test_calibration_texts(tmp_path):
    """Files, folders and conversations; a choice of windows by seed; overlap is an error."""
    model = LayeredModel.open(None)
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one two three"}\n{"messages": [{"role": "user", "content": "hello"}]}\n'
    )
    (tmp_path / "b.txt").write_text("four five six " * 100)
    whole = text_of(model, source=str(tmp_path), windows=1000, tokens=16)
    assert whole.windows[-1] != whole.windows[-2]
    text = model.loaded.tokenizer.decode([token for w in whole.windows for token in w])
    assert "one two three" in text and "hello" in text and "four five six" in text
    some = text_of(model, source=str(tmp_path), windows=3, tokens=16)
    assert len(some.windows) == 3 and set(some.windows) <= set(whole.windows)
    whole.check_apart([tuple(range(100))])
    with pytest.raises(InvalidRequestError, match="50 tokens in a row"):
        text_of(model, source=str(tmp_path / "b.txt"), tokens=64).check_apart(
            [tuple(model.loaded.tokenizer.encode("four five six " * 100))]
        )
    (tmp_path / "bad.txt").write_bytes(b"\xff\xff")
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        text_of(model, source=str(tmp_path / "bad.txt"))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        text_of(model, source=str(tmp_path / "none.txt"))


def test_what_does_not_fit_into_memory_is_refused_with_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.compress.memory.available_memory_bytes", lambda: 1_000_000)
    folder = write_folder(tmp_path / "model")
    with pytest.raises(OutOfMemoryError, match=r"peak 0\.\d\d GB .* 0\.00 GB are free"):
        made(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_impossible_recipes_are_refused():
    for settings, message in (
        ({"bits": 9}, "bits is 9"),
        ({"method": "magic"}, "no method 'magic'"),
        ({"format": "gptq", "bits": 5}, "no 5 bits"),
        ({"group_size": -1}, "group_size is -1"),
        ({"bits_per_weight": 1.5}, "bits_per_weight is 1.5"),
        ({"bits_per_weight": float("nan")}, "bits_per_weight is nan"),
        ({"bits_per_weight": 5, "bits": 5}, "not with `bits`"),
        ({"bits_per_weight": 5, "group_size": 0}, "goes with groups"),
        ({"bits_per_weight": 5, "method": "rtn"}, "is for `method` gptq"),
        ({"bits_per_weight": 5, "format": "gptq"}, "in the format compressed-tensors"),
    ):
        with pytest.raises(SettingsError, match=message):
            Recipe(**settings)


def test_a_shard_is_a_safetensors_file(tmp_path):
    from ridgeline.weights.safetensors_writer import write_safetensors

    tensors = {
        "a": torch.arange(5, dtype=torch.int64),
        "b": torch.randn(3, 4).half(),
        "c": torch.randn(7).bfloat16()[::2],
        "d": torch.zeros(0, 3),
    }
    digest = write_safetensors(
        tmp_path / "x.safetensors", {name: as_array(each) for name, each in tensors.items()}
    )
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_seventy_billion_parameters_take_less_than_16_gb():
    """By the formula, in which the number of layers is no term."""
    needs = []
    for layers in (2, 80):
        config = PRESETS["llama-3.1-70b"] | {"num_hidden_layers": layers}
        spec = describe(config).spec
        model = LayeredModel(
            loaded=SimpleNamespace(definition=SimpleNamespace(spec=spec)),
            runs=tuple(layer_ops(lower(spec))),
        )
        matrices = [products(run) for run in model.runs]
        windows = [range(2048)] * 128
        needs.append(memory_need(model, matrices, windows, is_calibrated=True).peak_bytes)
    assert needs[0] == needs[1]
    assert 12e9 < needs[0] < 16e9


MEASURED_PEAK = """
import json, resource, sys
import psutil, torch
torch.set_num_threads(1)
from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
model, needs = LayeredModel.open(sys.argv[1]), []
recipe = Recipe(window_tokens=128, num_windows=2)
text = calibration_text("embedded", model.loaded, recipe)
before = psutil.Process().memory_info().rss
quantize(model, __import__("pathlib").Path(sys.argv[2]), recipe, text, announce=needs.append)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([before, peak, needs[0].peak_bytes]))
"""


@pytest.mark.slow
def test_memory_is_what_the_formula_says(tmp_path):
    """Of all the process, at most 1.15 of what it had and the formula, beside pages of the model's
    file, which stay mapped and are the system's to take back."""
    folder = write_folder(
        tmp_path / "model",
        SMALL | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
        | {"num_hidden_layers": 2},
    )  # fmt: skip
    words = [sys.executable, "-c", MEASURED_PEAK, folder, tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, peak, need = json.loads(done.stdout)
    assert peak < 1.15 * (before + need) + (folder / "model.safetensors").stat().st_size
