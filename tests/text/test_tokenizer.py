"""The tokenizer equals transformers' ``AutoTokenizer`` on the same folder."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.text.tokenizer_kinds import KINDS, TEXTS, build, write_folder
from tokenizers import AddedToken
from transformers import AutoTokenizer

from ridgeline.core.errors import InvalidRequestError, RidgelineError, TokenizerError
from ridgeline.text import Tokenizer


def _assert_same(folder: Path, texts: list[str]) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id
    rng = random.Random(1)
    for text in texts:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids, text
            ids = [*ids, *rng.choices(range(len(theirs)), k=20)]
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected, ids


@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, tmp_path: Path) -> None:
    _assert_same(write_folder(tmp_path, kind), TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_one_has_the_ids_of_the_librarys_single_call(kind: str) -> None:
    backend = build(kind)[0]
    text = "".join(random.Random(2).choices([*TEXTS, "<|end|>", "</s>", "e\u0301"], k=400))
    for add in (True, False):
        ids = backend.encode(text, add_special_tokens=add).ids
        assert Tokenizer(backend).encode(text, add_special_tokens=add) == ids
    assert Tokenizer(backend).decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_other_threads_run_while_a_text_is_tokenized(method: str) -> None:
    tokenizer = Tokenizer(build("gpt2")[0])
    text = "Hello, world! " * 20_000
    argument: Any = tokenizer.encode(text) if method == "decode" else text
    done, turns = threading.Event(), 0

    def work() -> None:
        for _ in range(20 if method == "decode" else 1):
            getattr(tokenizer, method)(argument)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.0005):
        turns += 1
    thread.join()
    assert turns >= 20


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
@pytest.mark.parametrize("kind", ["llama3", "llama2", "gpt2"])
def test_bos_and_eos_flags(
    kind: str, add_bos: bool | None, add_eos: bool | None, tmp_path: Path
) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    given = {name: value for name, value in flags.items() if value is not None}
    _assert_same(write_folder(tmp_path, kind, **given), TEXTS[:3])


CONFIGS: list[dict[str, Any]] = [
    {"bos_token": "<new-bos>"},
    {"eos_token": {"__type": "AddedToken", "content": "<new>", "lstrip": True, "rstrip": True}},
    {"pad_token": None, "image_token": "<image>"},
    {"additional_special_tokens": ["<a>", "<b>"]},
    {"extra_special_tokens": {"audio_token": "<audio>"}},
    {"added_tokens_decoder": {"900": {"content": "<x>", "special": True, "normalized": False}}},
    {"added_tokens_decoder": {"1": {"content": "<|end|>", "special": True, "lstrip": True}}},
    {"model_max_length": 4, "padding_side": "left", "truncation_side": "left"},
]


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_declared_tokens(index: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama3", **CONFIGS[index])
    _assert_same(
        folder, ["a <new> b<new-bos>c", "<a>x<b> <image> <audio><x> <|end|> y", *TEXTS[:2]]
    )


def test_special_tokens_map_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gpt2")
    extra = {"bos_token": {"content": "<map>", "normalized": False}, "eos_token": "<|im_end|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(extra))
    _assert_same(folder, ["a<map>b<|im_end|> c"])


@pytest.mark.parametrize("declared", [{}, {"added_tokens_decoder": {}}])
def test_a_name_may_make_a_token_special(declared: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gpt2", eos_token="<|im_end|>", **declared)
    _assert_same(folder, ["a<|im_end|> c"])
    (folder / "added_tokens.json").write_text('{"<|endoftext|>": 0, "<later>": 502}')
    _assert_same(folder, ["a<later> c<|endoftext|>"])


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_vocabulary_and_merges(name: str, flags: dict[str, bool], tmp_path: Path) -> None:
    backend, special = build("gpt2")
    state = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in state["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    config = {"tokenizer_class": name, **special, **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    _assert_same(tmp_path, TEXTS)


def test_truncation_and_padding_do_not_alter_prompts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gpt2")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))
    _assert_same(folder, TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_make_up_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, kind))
    if kind in ("wordpiece", "end-of-word", "no-decoder"):
        assert tokenizer.token_bytes(3)
        return
    for text in TEXTS[:7]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        plain = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined in (plain, " " + plain)
    assert tokenizer.token_bytes(10**6) == b""


def test_bytes_of_single_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "llama2"))
    byte = tokenizer.token_to_id("<0xE4>")
    assert byte is not None
    assert tokenizer.token_bytes(byte) == b"\xe4"
    tokens = [(tokenizer.id_to_token(index) or "", index) for index in range(tokenizer.vocab_size)]
    token, word = max(tokens, key=lambda item: len(item[0]))
    assert "▁" in token
    assert tokenizer.token_bytes(word) == token.replace("▁", " ").encode()


def test_ids_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "llama3"))
    bos = tokenizer.token_to_id("<s>")
    assert bos == tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.is_special(bos)
    assert not tokenizer.is_special(0)
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(2**40) is None
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.decode([10**6, 2**32 - 1]) == ""


@pytest.mark.parametrize(
    ("generation", "config_token", "config", "expected"),
    [
        ([3, 4], "</s>", 5, {3, 4}),
        (3, "</s>", 5, {3}),
        (None, "</s>", 5, {2}),
        ([], "</s>", 5, {2}),
        (None, None, [5, 6], {5, 6}),
        (None, "not in the vocabulary", 5, None),
        (None, None, None, set()),
    ],
)
def test_order_of_eos(
    generation: Any,
    config_token: str | None,
    config: Any,
    expected: set[int] | None,
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path, "llama2", eos_token=config_token)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config}))
    tokenizer = Tokenizer.from_folder(folder)
    if expected is None:  # it is added to the vocabulary, as transformers does
        expected = {tokenizer.vocab_size - 1}
    assert tokenizer.eos_token_ids == frozenset(expected)


def test_digest_tells_vocabularies_apart(tmp_path: Path) -> None:
    digests = {}
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        digests[kind] = Tokenizer.from_folder(write_folder(tmp_path / kind, kind)).digest()
    assert len(set(digests.values())) == len(KINDS)
    again = Tokenizer.from_folder(write_folder(tmp_path / "gpt2", "gpt2", chat_template="x"))
    assert again.digest() == digests["gpt2"]
    backend, _ = build("gpt2")
    more = type(backend).from_str(backend.to_str())
    more.add_tokens([AddedToken("<one more>")])
    assert Tokenizer(more).digest() != digests["gpt2"]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", b"bytes", None, 3])
def test_text_that_is_no_text(text: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "gpt2"))
    with pytest.raises(InvalidRequestError):
        tokenizer.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], [None]])
def test_ids_that_are_no_ids(ids: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "gpt2"))
    with pytest.raises(InvalidRequestError):
        tokenizer.decode(ids)


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(TokenizerError, match=r"convert it to tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text('{"▁a": 0}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError):
        Tokenizer.from_folder(tmp_path / "missing")


def test_prefix_that_would_abort_the_library(tmp_path: Path) -> None:
    """The library cuts characters apart, and the process dies: only a check before can help."""
    folder = write_folder(tmp_path, "llama2")
    path = folder / "tokenizer.json"
    for key in ('"continuing_subword_prefix"', r'"\u0063ontinuing_subword_prefix"'):
        damaged = path.read_text().replace('"continuing_subword_prefix": null', f'{key}: "k"')
        assert damaged != path.read_text()
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(TokenizerError, match="prefix"):
            Tokenizer.from_folder(folder)
        write_folder(tmp_path, "llama2")


def test_token_that_would_overflow_the_stack(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "unigram")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["vocab"].append(["q" * 10**6, -9.0])
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(TokenizerError, match="characters"):
        Tokenizer.from_folder(folder)


def test_prompt_is_not_in_the_errors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gpt2")
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(RidgelineError) as caught:
        tokenizer.encode("secret \ud800")
    assert "secret" not in str(caught.value)
