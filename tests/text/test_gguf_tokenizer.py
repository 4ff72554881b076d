"""Tokenizers from GGUF metadata give the ids of the tokenizer that was converted."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import TokenizerError
from ridgeline.text import Tokenizer, tokenizer_from_gguf
from ridgeline.text.pre_tokenizers import PRE_TOKENIZATIONS

WORDS = """the of and to in Hello world's DON'T I'll we've naïve café résumé Größe Привет мир
γειά σου שלום مرحبا नमस्ते สวัสดี 你好 世界 こんにちは カタカナ 한국어 안녕 🚀 😶‍🌫️ 👩🏽‍💻 🇩🇪 ①② ½
2024 12345678
3.14 1,000 x=1; def f(x): return_value camelCase HTTPServer == != -> => // /* */ <div> &amp; {{ }}
[0:10] "quoted" 'single' `code` $HOME ~/path \\n \\t ... —— “ ” « » e\u0301 n\u0303o A\u030a ﬁ ǅ ª
ＦＵＬＬ １２ <tag> ' '' 's 'S 'Ll""".split()  # noqa: SIM905
SPACES = [" ", " ", " ", " ", "  ", "   ", "\t", "\n", "\n\n", " \n ", "\r\n", "\u00a0", "\u3000",
          "\u200b", "", "        "]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|start|>", "<|stop|>"]


def lines(count: int = 1200, seed: int = 7) -> list[str]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        parts = [rng.choice(SPACES) + rng.choice(WORDS) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.1:
            parts.append("".join(chr(rng.choice([0x20, 0x3B1, 0x4E2D, 0x1F600]) + rng.randrange(64))
                                 for _ in range(8)))  # fmt: skip
        if rng.random() < 0.1:
            parts.insert(rng.randrange(len(parts)), rng.choice(SPECIAL))
        found.append("".join(parts) + rng.choice(SPACES))
    return found


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """As these models' tokenizer.json has it."""
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def byte_level(digits: bool) -> pre_tokenizers.PreTokenizer:
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), step] if digits else [step]
    )


FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]
)
PIPELINES = {
    "llama-bpe": (split(LLAMA3), None),
    "qwen2": (split(QWEN2), normalizers.NFC()),
    "gpt-2": (byte_level(digits=False), None),
    "smollm": (byte_level(digits=True), None),
    "falcon": (FALCON, None),
    "gpt-4o": (split(O200K), None),
}


def byte_level_bpe(name: str) -> Backend:
    backend = Backend(models.BPE(ignore_merges=PRE_TOKENIZATIONS[name].ignore_merges))
    backend.pre_tokenizer, normalizer = PIPELINES[name]
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    backend.train_from_iterator(lines(600, seed=1), trainer)
    return backend


def metadata(backend: Backend, model: str, pre: str = "default", **more: object) -> dict:
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    values = {"model": model, "pre": pre, "tokens": tokens, "token_type": np.array(kinds, "<i4")}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items()}


@pytest.mark.parametrize("name", PIPELINES)
def test_byte_level_bpe(name: str) -> None:
    original = byte_level_bpe(name)
    merges = [" ".join(pair) for pair in _model(original)["merges"]]
    found = tokenizer_from_gguf(
        metadata(original, "gpt2", name, merges=merges, bos_token_id=0, eos_token_id=1)
    )
    assert found is not None
    for line in lines():
        ids = original.encode(line, add_special_tokens=False).ids
        assert found.encode(line, add_special_tokens=False) == ids, line
        assert found.decode(ids) == original.decode(ids)
    assert (found.bos_token_id, found.eos_token_ids) == (0, {1})
    starts = [0] if PRE_TOKENIZATIONS[name].add_bos else []
    assert found.encode("x")[:1] == (starts or found.encode("x", add_special_tokens=False)[:1])
    assert found.digest() == Tokenizer(original).digest()


@pytest.mark.parametrize(
    ("model", "prefix"), [("llama", True), ("llama", False), ("gemma4", False)]
)
def test_sentencepiece(model: str, prefix: bool) -> None:
    """The original has a list of merges; a file only scores, as SentencePiece's have, or both."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False,
        limit_alphabet=120, max_token_length=8,
    )  # fmt: skip
    trained.train_from_iterator(lines(500, seed=2), trainer)
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # Scores fall with the id, which is the order of training; all pairs that join to a token merge.
    merges = []
    for token in tokens[259:]:
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if all(part in vocabulary for part in pair)]
        merges += sorted(pairs, key=lambda pair: (-len(pair[0]), -len(pair[1])))
    original = Backend(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    spell = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spell]) if prefix else spell
    original.normalizer = normalizer
    original.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    found = tokenizer_from_gguf(
        metadata(
            original,
            model,
            token_type=np.array(kinds, "<i4"),
            scores=-np.arange(len(tokens), dtype="<f4"),
            unknown_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            add_space_prefix=prefix,
            **({"merges": [" ".join(pair) for pair in merges]} if model == "gemma4" else {}),
        )
    )
    assert found is not None
    used_bytes = 0
    for line in lines():
        ids = original.encode(line, add_special_tokens=False).ids
        assert found.encode(line, add_special_tokens=False) == ids, line
        used_bytes += sum(3 <= index < 259 for index in ids)
        if not any(token in line for token in SPECIAL):
            assert found.decode(ids) == line
    assert used_bytes > 100
    assert found.encode("x")[0] == 1


def _model(backend: Backend) -> dict:
    import json

    return json.loads(backend.to_str())["model"]


def test_unigram() -> None:
    trained = Backend(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(lines(300, seed=3), trainer)
    pieces = _model(trained)["vocab"]
    found = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
            "tokenizer.ggml.scores": np.array([score for _, score in pieces], "<f8"),
            "tokenizer.ggml.token_type": np.array([2] + [1] * (len(pieces) - 1), "<i4"),
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    assert found is not None
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    for line in lines(200):
        if not any(token in line for token in SPECIAL):
            assert found.encode(line) == trained.encode(line).ids, line


def test_every_pre_tokenizer_compiles_and_keeps_all_text() -> None:
    for name, pre in PRE_TOKENIZATIONS.items():
        pieces = pre.pre_tokenizer().pre_tokenize_str("Don't stop 12345 你好\n\n  x=1 é")
        joined = "".join(piece for piece, _ in pieces)
        assert decoders.ByteLevel().decode([joined]) == "Don't stop 12345 你好\n\n  x=1 é", name


def test_ends_and_templates() -> None:
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>", "<|im_end|>", "<|end|>",
              "[PAD259]"]  # fmt: skip
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3, 3, 1, 5], "<i4"),
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.chat_template": "{{ a }}",
    }
    found = tokenizer_from_gguf(base)
    assert found is not None
    assert found.eos_token_ids == {256, 257}  # <|end|> is no control token here
    assert found.chat_template == "{{ a }}"
    assert found.encode("a")[-1] == 256
    assert found.id_to_token(259) is None
    named = base | {"tokenizer.chat_templates": ["tool"], "tokenizer.chat_template.tool": "{{ b }}"}
    found = tokenizer_from_gguf(named)
    assert found is not None
    assert found.chat_template == {"default": "{{ a }}", "tool": "{{ b }}"}
    assert tokenizer_from_gguf({}) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "bert"}, "model 'bert'; supported are gpt2, gemma4, llama, t5"),
        ({"pre": "nobody"}, "pre-tokenizer 'nobody'"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"tokens": []}, "no list"),
        ({"tokens": np.zeros(3)}, "no list"),
        ({"token_type": np.zeros(1, "<i4")}, "one number for each token"),
        ({"merges": ["ab"]}, "pairs"),
        ({"merges": ["a z"]}, "cannot be used"),
        ({"model": "llama"}, r"no tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": np.array([np.nan] * 2)}, "finite"),
        ({"add_bos_token": 1}, "true or false"),
    ],
)
def test_what_is_damaged_is_named(change: dict, text: str) -> None:
    good = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": []}
    values = {f"tokenizer.ggml.{key}": value for key, value in (good | change).items()}
    with pytest.raises(TokenizerError, match=text):
        tokenizer_from_gguf(values)
