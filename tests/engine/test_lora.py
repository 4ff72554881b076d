"""Adapters written by PEFT: logits as PEFT's, and each sequence of a batch with its own."""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.weights.gguf_export import export

from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import main
from ridgeline.core.errors import (
    CorruptFileError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsMismatchError,
)

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LORAS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
    "everything": {"r": 8, "lora_alpha": 4, "target_modules": EVERYTHING, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"down_proj": 32, "layers.1.self_attn.q_proj": 1},
    },
    "one layer": {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [1]},
}
IDS = [5, 17, 3, 99, 42, 7, 150, 8, 23, 61, 4, 198]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make(folder, config, model_class, loras):
    """Save a random model and its adapters; PEFT's logits by adapter name."""
    torch.manual_seed(0)
    base = model_class(config).float()
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    base.save_pretrained(folder / "base")
    expected, paths = {}, {}
    for name, settings in loras.items():
        base = model_class.from_pretrained(folder / "base", dtype=torch.float32)
        model = peft.get_peft_model(base, peft.LoraConfig(**settings))
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
        paths[name] = str(folder / name)
        model.save_pretrained(paths[name])
        with torch.no_grad():
            expected[name] = model(torch.tensor([IDS])).logits[0].numpy()
    return str(folder / "base"), paths, expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = transformers.LlamaConfig(**SIZES)
    folder = tmp_path_factory.mktemp("llama")
    return make(folder, config, transformers.LlamaForCausalLM, LORAS)


def test_logits_equal_those_of_peft(llama):
    base, paths, expected = llama
    with LLM(base, adapters=paths, dtype="float32") as llm:
        plain = llm.logits(IDS)
        for name in paths:
            logits = llm.logits(IDS, adapter=name)
            np.testing.assert_allclose(logits, expected[name], atol=1e-4)
            assert np.abs(logits - plain).max() > 0.1


def test_fused_and_transposed_matrices(tmp_path):
    """Phi-3 adapts one matrix for q, k and v; GPT-2 stores its matrices transposed."""
    sizes = SIZES | {"num_key_value_heads": 4}
    phi3 = transformers.Phi3Config(**sizes)
    gpt2 = transformers.GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    for name, config, model_class, targets in (
        ("phi3", phi3, transformers.Phi3ForCausalLM, ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("gpt2", gpt2, transformers.GPT2LMHeadModel, ["c_attn", "c_fc"]),
    ):
        folder = tmp_path / name
        loras = {"a": {"r": 4, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}}
        base, paths, expected = make(folder, config, model_class, loras)
        with LLM(base, adapters=paths, dtype="float32") as llm:
            np.testing.assert_allclose(llm.logits(IDS, adapter="a"), expected["a"], atol=1e-4)


def test_the_text_model_beside_a_vision_tower(tmp_path):
    """transformers names its modules otherwise than the tensors that it saves."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = SIZES | {"head_dim": 16, "sliding_window": 8}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    loras = {"a": {"r": 4, "target_modules": r".*language_model.*(q|v|down)_proj"}}
    model_class = transformers.Gemma3ForConditionalGeneration
    base, paths, expected = make(tmp_path, config, model_class, loras)
    with LLM(base, adapters=paths, dtype="float32") as llm:
        np.testing.assert_allclose(llm.logits(IDS, adapter="a"), expected["a"], atol=1e-4)


def test_a_gguf_file_takes_the_adapters_of_the_model_that_it_was_made_from(tmp_path):
    sizes = SIZES | {"num_key_value_heads": 4}
    phi3 = transformers.Phi3Config(**sizes)
    llama = transformers.LlamaConfig(**SIZES)
    for name, config, model_class, targets in (
        ("llama", llama, transformers.LlamaForCausalLM, EVERYTHING),
        ("phi3", phi3, transformers.Phi3ForCausalLM, ["qkv_proj", "gate_up_proj", "o_proj"]),
    ):
        loras = {"a": {"r": 4, "target_modules": targets}}
        base, paths, expected = make(tmp_path / name, config, model_class, loras)
        path = tmp_path / f"{name}.gguf"
        export(Path(base), path, name)
        with LLM(str(path), adapters=paths, dtype="float32") as llm:
            np.testing.assert_allclose(llm.logits(IDS, adapter="a"), expected["a"], atol=1e-4)


def test_four_adapters_and_none_in_one_batch_equal_each_alone(llama):
    base, paths, _ = llama
    names = [*paths, None, *paths]
    with LLM(base, adapters=paths, dtype="float64") as llm:
        together = llm.generate([IDS] * 9, GREEDY, adapter=names)
        alone = [llm.generate(IDS, GREEDY, adapter=name)[0] for name in names]
    tokens = [output.outputs[0].token_ids for output in together]
    assert tokens == [output.outputs[0].token_ids for output in alone]
    assert len(set(tokens)) > 1


def test_the_prefix_cache_keeps_adapters_apart(llama):
    base, paths, _ = llama
    prompt = IDS * 4
    with LLM(base, adapters=paths, dtype="float64", block_tokens=4) as llm:
        first = llm.generate(prompt, GREEDY, adapter="attention")[0]
        other = llm.generate(prompt, GREEDY, adapter="everything")[0]
        again = llm.generate(prompt, GREEDY, adapter="attention")[0]
    assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 0)
    assert again.num_cached_tokens == 44
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_from_the_command_line(llama, capsys):
    base, paths, expected = llama
    options = ["--prompt-ids", ",".join(map(str, IDS)), "--max-tokens", "1", "--temperature", "0"]
    adapters = [f"--adapters=x={paths['attention']}", "--adapter", "x", "--dtype", "float32"]
    assert main(["generate", base, *options, *adapters, "--json"]) == 0
    (token,) = json.loads(capsys.readouterr().out)["token_ids"]
    assert token == int(expected["attention"][-1].argmax())


def test_an_unknown_adapter_is_refused(llama):
    base, paths, _ = llama
    with LLM(base, adapters=paths) as llm:
        with pytest.raises(InvalidRequestError, match="no adapter 'sql'"):
            llm.generate(IDS, GREEDY, adapter="sql")
        with pytest.raises(InvalidRequestError, match="1 adapters for 2"):
            llm.generate([IDS, IDS], GREEDY, adapter=["attention"])


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def rename(tensors, old, new):
    return {name.replace(old, new): value for name, value in tensors.items()}


DAMAGE = [
    (lambda f: (f / "adapter_config.json").unlink(), ModelNotFoundError),
    (lambda f: (f / "adapter_model.safetensors").unlink(), ModelNotFoundError),
    (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 20), CorruptFileError),
    (lambda f: edit_config(f, peft_type="IA3"), UnsupportedModelError),
    (lambda f: edit_config(f, use_dora=True), UnsupportedModelError),
    (lambda f: edit_config(f, bias="all"), UnsupportedModelError),
    (lambda f: edit_config(f, modules_to_save=["lm_head"]), UnsupportedModelError),
    (lambda f: edit_config(f, init_lora_weights="pissa_niter_16"), UnsupportedModelError),
    (lambda f: edit_config(f, init_lora_weights="olora"), UnsupportedModelError),
    (lambda f: edit_config(f, init_lora_weights={}), UnsupportedModelError),
    (lambda f: edit_config(f, use_bdlora={"nblocks": 2}), UnsupportedModelError),
    (lambda f: edit_config(f, lora_alpha="x"), CorruptFileError),
    (lambda f: edit_config(f, lora_alpha=10**400), CorruptFileError),
    (lambda f: edit_config(f, alpha_pattern={"(a+)+": 1}), UnsupportedModelError),
    (lambda f: edit_config(f, alpha_pattern=[1]), CorruptFileError),
    (lambda f: edit_tensors(f, lambda t: dict(list(t.items())[:-1])), WeightsMismatchError),
    (lambda f: edit_tensors(f, lambda t: rename(t, "q_proj", "z")), UnsupportedModelError),
    (lambda f: edit_tensors(f, lambda t: rename(t, "lora_A", "lora_Z")), UnsupportedModelError),
    (
        lambda f: edit_tensors(f, lambda t: {k: v[:, :1].contiguous() for k, v in t.items()}),
        WeightsMismatchError,
    ),
    (lambda f: edit_tensors(f, lambda _: {}), WeightsMismatchError),
]


@pytest.mark.parametrize("index", range(len(DAMAGE)))
def test_damaged_and_unsupported_adapters_are_refused(llama, tmp_path, index):
    base, paths, _ = llama
    damage, error = DAMAGE[index]
    shutil.copytree(paths["attention"], tmp_path / "adapter")
    damage(tmp_path / "adapter")
    with pytest.raises(error):
        LLM(base, adapters={"x": str(tmp_path / "adapter")})
