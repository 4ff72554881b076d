"""Grammars over every kind of tokenizer: whatever is allowed or forced is the text they ask for."""

import random
from types import SimpleNamespace

import pytest
from tests.decoding.grammars.conftest import random_walk
from tests.text.tokenizer_kinds import write_folder

from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.decoding.grammars.vocabulary import _Source, grammar_vocabulary
from ridgeline.text import IncrementalDetokenizer, Tokenizer

CHOICES = [
    "hello world",
    " lead",
    "\ttab",
    "Köln 日本",
    '{"a": [1]}',
    "The <s>token</s>",
    "<|end|>",
]


@pytest.fixture(scope="module", params=["gpt2", "llama3", "llama2", "metaspace", "gemma"])
def tokenizer(request, tmp_path_factory):
    return Tokenizer.from_folder(
        write_folder(tmp_path_factory.mktemp(request.param), request.param)
    )


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, tokenizer.vocab_size))
    yield made
    made.close()


def text_of(tokenizer, tokens):
    """What the tokens are after others."""
    before = tokenizer.encode("hello", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, context_ids=before)
    return detokenizer.push(tokens) + detokenizer.finish()


@pytest.mark.parametrize("choice", CHOICES)
def test_the_only_choice_is_what_comes(tokenizer, compiler, choice):
    one = compiler.prepare(StructuredOutputs.of({"choice": [choice]}))()
    forced = one.forced(64)
    assert choice.startswith(text_of(tokenizer, forced))
    assert len(one.valid(forced)) == len(forced)
    tokens = random_walk(one, tokenizer, random.Random(0))
    assert text_of(tokenizer, tokens) == choice


def test_one_of_several_comes(tokenizer, compiler):
    grammar = compiler.prepare(StructuredOutputs.of({"choice": CHOICES}))
    walks = [random_walk(grammar(), tokenizer, random.Random(seed)) for seed in range(20)]
    assert {text_of(tokenizer, tokens) for tokens in walks} <= set(CHOICES)


@pytest.mark.parametrize("text", ["def f(x): return x; " * 150, " " * 3000, "<s>token</s>" * 200])
def test_no_more_of_a_long_text_is_tokenized_than_a_step_takes(
    tokenizer, compiler, text, monkeypatch
):
    one = compiler.prepare(StructuredOutputs.of({"choice": [text]}))()
    usual, lengths = Tokenizer.encode, []

    def encode(self, text, add_special_tokens=True):
        lengths.append(len(text))
        return usual(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    tokens = []
    while not one.is_complete:
        forced = one.forced(32)
        assert len(one.valid(forced)) == len(forced) > 0
        one.advance(forced)
        tokens += forced
    assert max(lengths) < 1100
    assert text_of(tokenizer, tokens) == text


@pytest.mark.parametrize("before", ["", "<x>"], ids=["alone", "behind others"])
def test_the_usual_tokens_are_taken_where_they_are_the_text(before):
    """A tokenizer may not take the longest token; and it may put something before a text."""
    texts = [b"a", b"bc", b"abc", b"_a"]
    tokenizer = SimpleNamespace(
        encode=lambda text, **_: [0, 1] if text == "abc" and not before else [3, 1, 0, 1],
        token_bytes=lambda index: texts[index],
        is_special=lambda _: False,
    )
    assert _Source(tokenizer, len(texts), eos_token_id=3)("abc") == [0, 1]


def test_a_text_is_tokenized_up_to_what_the_vocabulary_lacks():
    words = {"a": 1, "ab": 2, "abc": 3, "<x>": 4, "c": 5}
    texts = {index: text for text, index in words.items()}
    tokenizer = SimpleNamespace(
        encode=lambda *_, **__: [4],
        token_bytes=lambda index: texts.get(index, "").encode(),
        is_special=lambda index: index == 4,
    )
    source = _Source(tokenizer, 8, eos_token_id=4)
    assert source("abcabac") == [3, 2, 1, 5]
    assert source("ab?c") == [2]
    assert source("<x>") == source("") == []
