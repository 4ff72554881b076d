"""The folder that ships with the package: complete, small, and better than chance by far."""

import json
from pathlib import Path

import pytest
import torch
from recipes.embedded import corpus, evaluation
from tokenizers import Tokenizer

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.compress.trainable import load_exported

ASSETS = Path(ridgeline.__file__).parent / "assets"
MAX_BYTES = 32 * 2**20
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
# Perplexity per token over the first 800 tokens of four held-out texts of each kind.
PERPLEXITY_BOUNDS = {
    "target": {"code": 10.0, "prose": 25.0},
    "draft": {"code": 45.0, "prose": 102.0},
}
PREFIX = "def fibonacci(n):\n"


def read_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_folder_is_complete(name: str) -> None:
    assert {file.name for file in (ASSETS / name).iterdir()} == FILES
    config = json.loads((ASSETS / name / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == read_tokenizer().get_vocab_size()


def test_tokenizers_are_equal() -> None:
    texts = [(ASSETS / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert texts[0] == texts[1]


def test_size() -> None:
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()) <= MAX_BYTES
    assert (ASSETS / "heldout" / "heldout.jsonl").stat().st_size <= 150_000


def test_tokenizer_is_lossless() -> None:
    tokenizer = read_tokenizer()
    text = "def f(x):\n\t\treturn 'naïve – 12345'  # é\n\n\n        pass\r\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.id_to_token(ids[0]) == "<|endoftext|>"


def test_held_out_texts_are_held_out() -> None:
    lines = (ASSETS / "heldout" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert {entry["kind"] for entry in entries} == {"code", "prose"}
    assert all(corpus.is_held_out(entry["path"]) for entry in entries)


@pytest.mark.parametrize("name", ["target", "draft"])
@pytest.mark.parametrize("kind", ["code", "prose"])
def test_held_out_perplexity(name: str, kind: str) -> None:
    model, tokenizer = load_exported(ASSETS / name), read_tokenizer()
    texts = evaluation.read_held_out(ASSETS, kind)[:4]
    nats = [evaluation.text_nats(model, tokenizer.encode(text).ids[:800]) for text in texts]
    assert torch.cat(nats).mean().exp().item() < PERPLEXITY_BOUNDS[name][kind]


def test_completion_is_indented_and_does_not_repeat_one_token() -> None:
    with LLM() as llm:
        (output,) = llm.generate([PREFIX], SamplingParams(temperature=0, max_tokens=40))
    text = output.outputs[0].text
    assert text.startswith("    ")
    assert len(set(text.split())) >= 6


def test_each_token_is_scored_once() -> None:
    for length in (1, 2, 700, 1024, 1025, 3000):
        scored = [p for _, first, stop in evaluation.windows(length) for p in range(first, stop)]
        assert scored == list(range(1, length))


def test_chat_template_ends_with_the_assistant() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / "target")
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = "<|endoftext|><|system|>\nBe short.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert text == expected
