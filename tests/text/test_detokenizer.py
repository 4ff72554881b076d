"""Deltas joined equal the full decode, for any tokens and any kind of tokenizer."""

import json
import random
from collections.abc import Callable

import pytest
from tests.text.tokenizer_kinds import KINDS, TEXTS, build
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from ridgeline.core.errors import TokenizerError
from ridgeline.text import IncrementalDetokenizer, Tokenizer

SEQUENCES = 5_000


def _sources(tokenizer: Tokenizer, rng: random.Random) -> list[Callable[[], list[int]]]:
    """Random ids, encoded text cut anywhere, bytes and marks in runs, special tokens, no tokens."""
    everything = range(tokenizer.vocab_size + 3)
    tokens = [tokenizer.id_to_token(index) or "" for index in everything]
    odd = [
        index
        for index in everything
        if tokenizer.is_special(index)
        or tokens[index].startswith("<0x")
        or tokens[index].strip("▁Ġ ") == ""
        or (len(tokenizer.token_bytes(index)) == 1 and tokenizer.token_bytes(index) > b"\x7f")
    ] or list(everything)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS if text.strip()]
    texts = [ids for ids in texts if ids] or [[0]]

    def cut_text() -> list[int]:
        ids = rng.choice(texts)
        start = rng.randrange(len(ids))
        return ids[start : start + 12] + rng.choice(texts)[: rng.randrange(8)]

    return [
        lambda: rng.choices(everything, k=rng.randrange(20)),
        cut_text,
        lambda: rng.choices(odd, k=rng.randrange(12)),
        lambda: rng.choices(odd, k=4) + rng.choices(everything, k=3) + rng.choices(odd, k=5),
    ]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_equal_full_decode(kind: str, skip: bool) -> None:
    tokenizer = Tokenizer(build(kind)[0])
    rng = random.Random(f"{kind}{skip}")
    sources = _sources(tokenizer, rng)
    for case in range(SEQUENCES):
        ids = sources[case % len(sources)]()
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        parts, at = [], 0
        while at < len(ids):
            step = 1 if case % 3 else rng.randrange(1, 5)
            parts.append(detokenizer.push(ids[at : at + step]))
            at += step
        parts.append(detokenizer.finish())
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "metaspace", "gemma", "unigram"])
def test_text_streams_and_characters_stay_whole(kind: str) -> None:
    tokenizer = Tokenizer(build(kind)[0])
    for text in TEXTS[:5]:
        detokenizer = IncrementalDetokenizer(tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas = [detokenizer.push([index]) for index in ids]
        assert not any("\ufffd" in delta for delta in deltas)
        # Nothing is held back but bytes, and the space that the decoder drops at the start.
        for index, delta in zip(ids[1:], deltas[1:], strict=True):
            assert delta or len(tokenizer.token_bytes(index)) == 1 or not text.isascii()


def test_tokens_after_a_context_continue_its_text() -> None:
    tokenizer = Tokenizer(build("llama2")[0])
    prompt, output = (tokenizer.encode(text, False) for text in ("hello", "world"))
    assert (tokenizer.id_to_token(output[0]) or "").startswith("▁")
    assert IncrementalDetokenizer(tokenizer).push(output) == "world"
    assert IncrementalDetokenizer(tokenizer, context_ids=prompt * 100).push(output) == " world"


def test_context_that_ends_inside_a_character() -> None:
    tokenizer = Tokenizer(build("gpt2")[0])
    ids = [tokenizer.token_to_id(char) for char in "ðŁİī"]  # 🎉 in bytes
    assert None not in ids
    whole = [index for index in ids if index is not None]
    detokenizer = IncrementalDetokenizer(tokenizer, context_ids=whole[:2])
    assert detokenizer.push(whole[2:3]) == ""
    assert detokenizer.push(whole[3:]) == "🎉"


def _output(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True
) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, context_ids=prompt, skip_special_tokens=skip)
    return "".join([detokenizer.push([index]) for index in output]) + detokenizer.finish()


def _spelt(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    return [index for index in ids if index is not None]


NEWLINE = ("<0x0A>",)
PARTY = ("<0xF0>", "<0x9F>", "<0x8E>", "<0x89>")  # 🎉


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "gemma", "unigram-bytes"])
@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (NEWLINE, ("a",), "a"),
        (NEWLINE, ("▁", "a"), " a"),
        (NEWLINE, (), ""),
        (NEWLINE, (*NEWLINE, "a"), "\na"),
        (PARTY, ("a",), "a"),
        (PARTY, PARTY, "🎉"),
        (NEWLINE + PARTY[:2], PARTY[2:], "🎉"),
        (NEWLINE + PARTY[:2], (*PARTY[2:], "a", *NEWLINE), "🎉a\n"),
        (PARTY[:2], ("a",), "a"),
        (PARTY[:3], (), ""),
        (PARTY[:3], NEWLINE, "\ufffd"),
        ((*NEWLINE, "</s>"), ("a",), "a"),
        ((*PARTY[:2], "</s>"), ("a",), "a"),
        ((*PARTY[:2], "</s>"), PARTY[2:], "\ufffd\ufffd"),
        (("</s>", *PARTY[:2]), PARTY[2:], "🎉"),
        (NEWLINE, ("</s>", "a"), "a"),
    ],
)
def test_bytes_at_the_end_of_a_context(
    kind: str, prompt: tuple[str, ...], output: tuple[str, ...], text: str
) -> None:
    """No whole character of it comes out; half of one may be completed."""
    tokenizer = Tokenizer(build(kind)[0])
    before = _spelt(tokenizer, "▁", "a", *prompt)
    assert _output(tokenizer, before, _spelt(tokenizer, *output)) == text


@pytest.mark.parametrize("output", ["a", ""])
def test_half_a_byte_level_character_that_is_not_completed_stays_in_the_context(
    output: str,
) -> None:
    tokenizer = Tokenizer(build("gpt2")[0])
    assert _output(tokenizer, _spelt(tokenizer, *"ðŁ"), _spelt(tokenizer, *output)) == output


def test_a_pattern_that_a_context_begins() -> None:
    backend = Backend.from_str(build("gpt2")[0].to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("aab", "x")])
    tokenizer = Tokenizer(backend)
    assert _output(tokenizer, _spelt(tokenizer, "a"), _spelt(tokenizer, "c")) == "c"
    assert _output(tokenizer, _spelt(tokenizer, "a", "a"), []) == ""


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_what_the_full_decode_adds_to_the_context(kind: str, skip: bool) -> None:
    tokenizer = Tokenizer(build(kind)[0])
    num_checked = 0
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for cut in range(1, min(len(ids), 16)):
            before = tokenizer.decode(ids[:cut], skip_special_tokens=skip)
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            if whole.startswith(before):  # else the cut is within a character
                found = _output(tokenizer, ids[:cut], ids[cut:], skip=skip)
                assert before + found == whole, (text, cut)
                num_checked += 1
    assert num_checked > 50 or kind == "no-decoder"


def test_special_token_that_its_normalizer_respells() -> None:
    """The library then no longer skips it; neither may the deltas."""
    state = json.loads(build("wordpiece")[0].to_str())
    state["added_tokens"][0]["normalized"] = True
    tokenizer = Tokenizer(Backend.from_str(json.dumps(state)))
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([0, 1]) + detokenizer.finish() == tokenizer.decode([0, 1]) == "[unk]"
    assert not tokenizer.is_special(0)
    assert tokenizer.is_special(1)


def test_invalid_bytes_at_the_end() -> None:
    tokenizer = Tokenizer(build("llama2")[0])
    first = tokenizer.token_to_id("<0xE4>")
    assert first is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([first, first]) == ""
    assert detokenizer.finish() == "\ufffd\ufffd"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("aa", "b")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("aab", "")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 3, 0)]),
        decoders.Sequence([decoders.Strip("a", 1, 0), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Replace("a", "aa"), decoders.Metaspace()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    ],
    ids=lambda decoder: str(decoder)[:40],
)
def test_unusual_decoders(decoder: decoders.Decoder) -> None:
    backend = Backend.from_str(build("llama2")[0].to_str())
    backend.add_tokens(["a", "aa", "aab", "▁a", "▁▁", "ba", "b"])
    backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    words = [tokenizer.token_to_id(t) for t in ("a", "aa", "aab", "▁a", "▁▁", "ba", "b")]
    some = [index for index in words if index is not None] + [5, 100, 230]
    rng = random.Random(2)
    for _ in range(SEQUENCES // 5):
        ids = rng.choices(some, k=rng.randrange(9))
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = "".join([detokenizer.push([index]) for index in ids]) + detokenizer.finish()
        assert text == tokenizer.decode(ids), ids


@pytest.mark.parametrize(
    "decoder",
    [decoders.CTC(), decoders.Strip("a", 0, 1), decoders.Replace("", "x")],
    ids=lambda decoder: str(decoder)[:20],
)
def test_decoders_that_cannot_stream_are_refused(decoder: decoders.Decoder) -> None:
    backend = Backend.from_str(build("llama2")[0].to_str())
    backend.decoder = decoder
    with pytest.raises(TokenizerError):
        Tokenizer(backend)
