"""A tokenizer written as GGUF metadata is read as the tokenizer that it was."""

import json

import gguf
import numpy as np
import pytest
from tests.text.test_gguf_tokenizer import PIPELINES, SPECIAL, byte_level_bpe, lines, split
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from ridgeline.core.errors import TokenizerError
from ridgeline.text import Tokenizer, tokenizer_from_gguf
from ridgeline.text.gguf_metadata import gguf_metadata
from ridgeline.text.pre_tokenizers import PRE_TOKENIZATIONS


def with_bos(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single=[SPECIAL[0], "$A"], special_tokens=[(SPECIAL[0], backend.token_to_id(SPECIAL[0]))]
    )
    return backend


def assert_same(found: Tokenizer | None, wanted: Tokenizer) -> None:
    assert found is not None
    for line in lines(400):
        for special in (False, True):
            assert found.encode(line, special) == wanted.encode(line, special), line
        ids = wanted.encode(line)
        assert found.decode(ids) == wanted.decode(ids)
    assert found.eos_token_ids == wanted.eos_token_ids
    assert found.special_tokens == wanted.special_tokens


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_rule_of_byte_level_bpe_is_found(name: str, bos: bool) -> None:
    backend = byte_level_bpe(name)
    tokenizer = Tokenizer(
        with_bos(backend) if bos else backend,
        special_tokens={"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]},
        eos_token_ids=frozenset({1}),
        chat_template={"default": "{{ a }}", "tool": "{{ b }}"},
    )
    metadata = gguf_metadata(tokenizer, tokenizer.vocab_size + 3)
    rule = PRE_TOKENIZATIONS[str(metadata["tokenizer.ggml.pre"])]
    assert rule.patterns == PRE_TOKENIZATIONS[name].patterns or name in ("smollm", "falcon")
    assert metadata["tokenizer.ggml.add_bos_token"] is bos
    found = tokenizer_from_gguf(metadata)
    assert_same(found, tokenizer)
    assert found is not None
    assert found.chat_template == tokenizer.chat_template
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, np.ndarray)
    assert tokens[-1] == f"[PAD{len(tokens) - 1}]"
    assert kinds[-1] == gguf.TokenType.UNUSED
    assert kinds[0] == gguf.TokenType.CONTROL


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gets_scores_that_merge_in_its_order(prefix: bool) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spell = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spell]) if prefix else spell
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False,
        limit_alphabet=120, max_token_length=8,
    )  # fmt: skip
    backend.train_from_iterator(lines(500, seed=2), trainer)
    model = json.loads(backend.to_str())["model"]
    # All pairs that join to a token merge, as in files that transformers converted.
    vocabulary = model["vocab"]
    ranks = {"".join(pair): rank for rank, pair in enumerate(model["merges"])}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [pair for pair in cuts if all(part in vocabulary for part in pair)]
    backend.model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Backend.from_str(_without_bytes_added(backend))
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer = Tokenizer(
        with_bos(backend),
        special_tokens={"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "unk_token": "<unk>"},
        eos_token_ids=frozenset({2}),
    )
    metadata = gguf_metadata(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert "tokenizer.ggml.merges" not in metadata
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, np.ndarray)
    assert kinds[:4].tolist() == [2, 3, 3, 6]
    found = tokenizer_from_gguf(metadata)
    assert found is not None
    for line in lines(400):
        assert found.encode(line) == tokenizer.encode(line), line


def _without_bytes_added(backend: Backend) -> str:
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    return json.dumps(content)


def test_what_cannot_be_said_is_refused() -> None:
    backend = byte_level_bpe("gpt-2")
    backend.pre_tokenizer = split(r"[aeiou]|[^aeiou]+")
    with pytest.raises(TokenizerError, match=r"No rule .*tokenizer\.ggml\.pre.* not written"):
        gguf_metadata(Tokenizer(backend), 900)
    with pytest.raises(TokenizerError, match="900 tokens and the model 899"):
        gguf_metadata(Tokenizer(byte_level_bpe("gpt-2")), 899)
    with pytest.raises(TokenizerError, match="model 'Unigram' is not written"):
        gguf_metadata(Tokenizer(Backend(models.Unigram([("a", 0.0)], 0, False))), 9)
    with pytest.raises(TokenizerError, match="4 tokens that end a text, and GGUF names 3"):
        gguf_metadata(Tokenizer(byte_level_bpe("gpt-2"), eos_token_ids=frozenset(range(4))), 900)
    with pytest.raises(TokenizerError, match=r"BOS before a text \(here none is named\)"):
        gguf_metadata(Tokenizer(with_bos(byte_level_bpe("gpt-2"))), 900)
