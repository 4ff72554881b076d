"""A text never has fewer tokens than its characters promise."""

import random

import pytest
from tests.text.test_gguf_tokenizer import PIPELINES, byte_level_bpe
from tests.text.tokenizer_kinds import KINDS, TEXTS, build
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ridgeline.text import Tokenizer

BOUNDED = ("gpt2", "llama3", "llama2", "metaspace", "gemma", "end-of-word")
COMPOSED = "\u03b1\u0313\u0300\u0345"  # four characters, and one in NFC
PIECES = [
    *TEXTS, "a", " ", "  ", "\t\n", "\u3000", COMPOSED, "\u1112\u1161\u11ab", "\ufdfa", "\x00\x7f",
    "<|end|>", "</s>", "<unk>", "\u200b", "\u0301", "\u00ad",
]  # fmt: skip


def texts(count: int, length: int = 20) -> list[str]:
    rng = random.Random(3)
    made = ["".join(rng.choices(PIECES, k=rng.randint(1, length))) for _ in range(count)]
    return made + [piece * 50 for piece in PIECES] + [f"{' ' * 500}<|end|>{' ' * 500}"] * 3


def promised(backend: Backend) -> list[tuple[int, int]]:
    """The least number of tokens of each text and how many there are, without special ones."""
    tokenizer = Tokenizer(backend)
    return [
        (tokenizer.least_tokens(text), len(tokenizer.encode(text, add_special_tokens=False)))
        for text in texts(200)
    ]


def with_tokens(kind: str, *tokens: AddedToken) -> Backend:
    backend = Backend.from_str(build(kind)[0].to_str())
    backend.add_tokens(list(tokens))
    return backend


def normalized(kind: str, *steps: normalizers.Normalizer) -> Backend:
    backend = with_tokens(kind)
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_tokenizer_makes_fewer_tokens_than_promised(kind):
    found = promised(build(kind)[0])
    assert all(least <= count for least, count in found)
    assert any(least > 0 for least, _ in found) == (kind in BOUNDED)


@pytest.mark.parametrize("name", PIPELINES)
def test_nor_does_a_pipeline_of_gguf(name):
    found = promised(byte_level_bpe(name))
    assert all(least <= count for least, count in found)
    assert any(least > 0 for least, _ in found)


@pytest.mark.parametrize(
    "steps",
    [
        (normalizers.NFC(),),
        (normalizers.NFKC(), normalizers.Lowercase()),
        (normalizers.NFD(),),
        (normalizers.Replace("aaaa", "a"), normalizers.NFC()),
        (normalizers.Strip(),),
        (normalizers.Replace("a", " "), normalizers.Strip()),
    ],
)
def test_nor_does_a_normalizer_that_shortens(steps):
    assert all(least <= count for least, count in promised(normalized("gpt2", *steps)))


@pytest.mark.parametrize(
    "step",
    [
        normalizers.StripAccents(),
        normalizers.Nmt(),
        normalizers.BertNormalizer(),
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Replace("a", ""),
        normalizers.Replace("a", " "),
    ],
)
def test_a_normalizer_that_may_drop_text_promises_nothing(step):
    assert {least for least, _ in promised(normalized("gpt2", step))} == {0}


def test_a_pre_tokenizer_that_may_drop_text_promises_nothing():
    backend = with_tokens("gpt2")
    cut = pre_tokenizers.Split("a", behavior="removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, backend.pre_tokenizer])
    assert {least for least, _ in promised(backend)} == {0}


def test_bytes_that_the_vocabulary_lacks_promise_nothing():
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert {least for least, _ in promised(backend)} == {0}
    backend.model = models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?")
    found = promised(backend)
    assert all(least <= count for least, count in found)
    assert any(least > 0 for least, _ in found)


def test_space_that_a_special_token_swallows_is_not_counted():
    """As those of Phi-3 do."""
    backend = with_tokens("gpt2", AddedToken("<|end|>", lstrip=True, rstrip=True))
    tokenizer = Tokenizer(backend)
    assert tokenizer.least_tokens(" \t\n\u3000" * 500 + "<|end|>") == 1
    assert tokenizer.least_tokens("a" * 500) > 10
    assert all(least <= count for least, count in promised(backend))


def test_what_an_added_token_is_normalized_to_counts():
    backend = normalized("gpt2", normalizers.Prepend("x" * 40))
    backend.add_tokens([AddedToken("tok", normalized=True)])
    assert all(least <= count for least, count in promised(backend))
