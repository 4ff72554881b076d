import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date

import numpy as np
import pytest
from tests.decoding.grammars.conftest import allowed, random_walk

from ridgeline.core.errors import InvalidRequestError, OverloadedError
from ridgeline.core.structured_outputs import StructuredOutputs, TextFormat
from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.decoding.grammars import compiled as compiled_module
from ridgeline.decoding.grammars import compiler as compiler_module
from ridgeline.decoding.grammars.checker import GrammarChecker
from ridgeline.decoding.grammars.vocabulary import grammar_vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"first name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["first name", "age"],
    "additionalProperties": False,
}


def constraint(compiler, **wanted):
    return compiler.prepare(StructuredOutputs.of(wanted))()


def walks(compiler, tokenizer, count=20, **wanted):
    for seed in range(count):
        tokens = random_walk(constraint(compiler, **wanted), tokenizer, random.Random(seed))
        if tokens is not None:
            yield tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ({"regex": "[a-c]{3,5}-[0-9]{2}"}, r"[a-c]{3,5}-[0-9]{2}"),
        ({"regex": "(?i:yes|no)"}, "(?i:yes|no)"),
        ({"choice": ["yes", "no", 'a "b"', "ü"]}, 'yes|no|a "b"|ü'),
        ({"choice": ["a\x7f", "\x00\n\\", "\u2028", "😀"]}, "a\x7f|\x00\n\\\\|\u2028|😀"),
        ({"grammar": 'start: "SELECT " /[a-z]{1,4}/ (" LIMIT " /[0-9]/)?'},
         "SELECT [a-z]{1,4}( LIMIT [0-9])?"),
        ({"format": "int"}, "-?[0-9]+"),
    ],
)  # fmt: skip
def test_outputs_match(compiler, tokenizer, wanted, matches):
    texts = list(walks(compiler, tokenizer, **wanted))
    assert len(texts) > 15
    assert all(re.fullmatch(matches, text) for text in texts)


@pytest.mark.parametrize(
    ("name", "parse"),
    [
        ("int", int),
        ("float", float),
        ("date", date.fromisoformat),
        ("bool", ("true", "false").index),
    ],
)
def test_formats_can_be_parsed(compiler, tokenizer, name, parse):
    texts = list(walks(compiler, tokenizer, count=60, format=name))
    assert len(texts) > 40
    for text in texts:
        parse(text)


def test_every_format_compiles(compiler):
    for name in TextFormat:
        constraint(compiler, format=str(name))


def test_the_29th_of_february_is_in_leap_years_only(compiler, tokenizer):
    for year, leap in ((2000, True), (1900, False), (2024, True), (2023, False), (0, False)):
        tokens = tokenizer.encode(f"{year:04}-02-29", add_special_tokens=False)
        valid = len(constraint(compiler, format="date").valid(tokens)) == len(tokens)
        assert valid is leap, year


@pytest.mark.parametrize("name", ["day", "default", "const", "enum", "examples"])
def test_a_property_may_be_named_like_a_keyword(compiler, tokenizer, name):
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "format": "date"}},
        "required": [name],
        "additionalProperties": False,
    }
    for day, is_valid in (("2024-02-29", True), ("2023-02-29", False)):
        text = f'{{"{name}": "{day}"}}'
        tokens = tokenizer.encode(text, add_special_tokens=False)
        valid = len(constraint(compiler, json=schema).valid(tokens)) == len(tokens)
        assert valid is is_valid, text


def test_the_end_is_allowed_iff_the_grammar_accepts(compiler, tokenizer):
    one = constraint(compiler, regex="a{2,3}")
    seen = []
    for _ in range(3):
        seen.append(bool(set(allowed(one.masks(())[0])) & tokenizer.eos_token_ids))
        assert not one.is_complete
        one.advance([tokenizer.token_to_id("a")])
    assert seen == [False, False, True]
    assert one.is_complete


def test_masks_after_drafts_are_those_of_advancing(compiler, tokenizer):
    text = '{"first name": "Ann", "age": 31}'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ahead, step = constraint(compiler, json=SCHEMA), constraint(compiler, json=SCHEMA)
    for start in range(len(tokens)):
        rows = ahead.masks(tokens[start : start + 4])
        follower = constraint(compiler, json=SCHEMA)
        follower.advance(tokens[:start])
        for row, token in zip(rows, [*tokens[start : start + 4], None], strict=True):
            np.testing.assert_array_equal(row, follower.masks(())[0])
            assert token is None or token in allowed(row)
            if token is not None:
                follower.advance([token])
        ahead.advance([tokens[start]])
        step.advance([tokens[start]])
    assert ahead.is_complete


def test_the_nodes_of_a_tree_are_masked_along_their_paths(compiler, tokenizer):
    one = constraint(compiler, regex="ab(c|d)ee?")
    before = one.masks(())
    a, b, c, d, e, z = map(tokenizer.token_to_id, "abcdez")
    (end,) = sorted(tokenizer.eos_token_ids)[:1]
    #         0  1  2  3  4  5  6  7    8  9
    drafts = (z, a, b, a, c, d, e, end, e, e)
    parents = (-1, -1, 1, 0, 2, 2, 5, 6, 4, 2)
    kept = one.valid(drafts, parents)
    assert kept == (1, 2, 4, 5, 6, 7, 8)
    rows = one.masks(drafts, parents)
    for node in kept:
        path, at = [], node
        while at >= 0:
            path.append(drafts[at])
            at = parents[at]
        if node != 7:  # an end
            follower = constraint(compiler, regex="ab(c|d)ee?")
            follower.advance(path[::-1])
            np.testing.assert_array_equal(rows[node + 1], follower.masks(())[0])
    np.testing.assert_array_equal(one.masks(()), before)
    assert constraint(compiler, regex="c|d").valid((c, d), (-1, -1)) == (0, 1)


def test_a_wrong_draft_changes_nothing(compiler, tokenizer):
    one = constraint(compiler, regex="abc")
    before = one.masks(())
    a, z = tokenizer.token_to_id("a"), tokenizer.token_to_id("z")
    one.masks((a, z, a))
    assert len(one.valid((a, z))) == 1
    np.testing.assert_array_equal(one.masks(()), before)


def test_forced_tokens_are_the_usual_ones(compiler, tokenizer):
    one = constraint(compiler, json=SCHEMA)
    forced = one.forced(32)
    assert '{"first name": "'.startswith(tokenizer.decode(forced))
    usual = tokenizer.encode('{"first name": "Ann", "age": 3}', add_special_tokens=False)
    assert list(forced) == usual[: len(forced)]
    assert len(forced) >= 3
    assert one.forced(2) == forced[:2]


@pytest.mark.parametrize(
    "value",
    [
        "json", {}, {"json": {}, "regex": "a"}, {"xml": "a"}, {"regex": 5}, {"regex": ""},
        {"choice": []}, {"choice": [""]}, {"choice": "ab"}, {"choice": ["a"] * 5000},
        {"json": "{"}, {"json": [1]}, {"json": {"a": {1, 2}}}, {"json": {"a": float("nan")}},
        {"choice": ["\ud800"]}, {"json": {"const": "\ud800"}}, {"regex": "\ud800"},
        {"format": "roman"}, {"grammar": "a" * (1 << 19)}, {"json": {"a": "b" * (1 << 19)}},
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_bad_wishes_are_refused(value):
    with pytest.raises(InvalidRequestError):
        StructuredOutputs.of(value)


def test_deep_schemas_are_refused():
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="deep"):
        StructuredOutputs.of({"json": schema})
    with pytest.raises(InvalidRequestError):
        StructuredOutputs.of({"json": '{"items":' * 20_000})


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "((("}, {"regex": "(?=a)b"}, {"grammar": "start: missing"}, {"grammar": "%%%"},
        {"json": {"type": "strnig"}}, {"json": {"$ref": "https://example.com/schema"}},
        {"json": {"type": "string", "pattern": "(["}},
        {"json": {"items": {"type": "integer", "minimum": 10**30, "maximum": 10**31}}},
        {"json": {"type": ["integer", "null"], "exclusiveMaximum": -(2**63)}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_grammar_is_refused_with_a_sentence(compiler, wanted):
    with pytest.raises(
        InvalidRequestError, match=r"structured_outputs\.\w+ was refused: \w"
    ) as info:
        compiler.prepare(StructuredOutputs.of(wanted))
    assert "\n" not in str(info.value)
    assert not compiler.is_prepared(StructuredOutputs.of(wanted))


def test_one_pattern_has_a_greatest_length(compiler):
    most = compiler_module.MAX_PATTERN_CHARS
    for wanted in ({"regex": "a" * most}, {"choice": ["a" * (most + 1)]}):
        constraint(compiler, **wanted)
    too_long = "a" * (most + 1)
    for wanted in ({"regex": too_long}, {"json": {"type": "string", "pattern": too_long}}):
        with pytest.raises(InvalidRequestError, match=f"may have {most} characters at most"):
            constraint(compiler, **wanted)


@pytest.mark.parametrize(
    ("wanted", "cause"),
    [({"regex": "a(b"}, "unclosed group"), ({"regex": "(?<=a)b"}, "look-around")],
    ids=str,
)
def test_the_cause_is_told(compiler, wanted, cause):
    with pytest.raises(InvalidRequestError, match=cause):
        compiler.prepare(StructuredOutputs.of(wanted))


def test_equal_grammars_that_come_together_are_compiled_once(tokenizer, monkeypatch):
    def slowly(checker, grammar):
        asked.append(grammar)
        time.sleep(0.1)
        return problem, 0

    asked, problem = [], ""
    monkeypatch.setattr(GrammarChecker, "tried", slowly)
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    wanted = [StructuredOutputs.of({"regex": "a{3}"})] * 4
    with ThreadPoolExecutor(4) as threads:
        grammars = list(threads.map(compiler.prepare, wanted))
        assert len(asked) == 1
        assert all(grammar is grammars[0] for grammar in grammars)
        problem, refused = "no", StructuredOutputs.of({"regex": "b{3}"})
        futures = [threads.submit(compiler.prepare, refused) for _ in range(4)]
        assert all(isinstance(each.exception(), InvalidRequestError) for each in futures)
    assert not compiler.is_prepared(refused)


def test_no_tenant_gains_by_anothers_grammars(tokenizer):
    """By the time that a grammar takes one could ask which others send."""
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    wanted = StructuredOutputs.of({"regex": "a{3}"})
    of_one = compiler.prepare(wanted, "one")
    assert compiler.is_prepared(wanted, "one")
    assert not compiler.is_prepared(wanted, "two")
    assert compiler.prepare(wanted, "two") is not of_one  # nor the states that its lexer has seen
    compiler.delete_tenant("one")
    assert not compiler.is_prepared(wanted, "one")
    assert compiler.is_prepared(wanted, "two")


def test_the_cache_is_bounded_and_shared(tokenizer):
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    for number in range(300):
        compiler.prepare(StructuredOutputs.of({"regex": f"a{{{number}}}"}))
    assert compiler.num_kept == 128
    assert compiler.is_prepared(StructuredOutputs.of({"regex": "a{299}"}))
    assert not compiler.is_prepared(StructuredOutputs.of({"regex": "a{0}"}))


def many_values(number):
    return StructuredOutputs.of({"json": {"enum": [f"{number} {i}" for i in range(2000)]}})


def test_the_cache_is_bounded_in_bytes(tokenizer, monkeypatch):
    """60 schemas of 10,000 values took 268 MB."""
    monkeypatch.setattr(compiler_module, "KEPT_BYTES", 4 << 20)
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    for number in range(12):
        compiler.prepare(many_values(number))
        assert compiler.num_kept == 1 or compiler.kept_bytes <= 4 << 20
    assert 1 < compiler.num_kept < 8
    assert compiler.is_prepared(many_values(11))
    compiler.prepare(StructuredOutputs.of({"regex": "a"}))
    assert compiler.kept_bytes > 1 << 20  # what it measured, not what it counted


def test_grammars_in_use_are_bounded_too(tokenizer, monkeypatch):
    """Requests that wait hold theirs, whether or not it is kept."""
    monkeypatch.setattr(compiler_module, "KEPT_BYTES", 0)
    monkeypatch.setattr(compiler_module, "LIVE_BYTES", 4 << 20)
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    held = [compiler.prepare(many_values(number)) for number in range(3)]
    with pytest.raises(OverloadedError, match="all the memory"):
        held += [compiler.prepare(many_values(number)) for number in range(3, 12)]
    held.clear()
    compiler.prepare(many_values(13))


def test_a_lexer_that_is_full_fails_one_output_and_is_replaced(tokenizer, monkeypatch):
    """Outputs share its states, of which there may be so many; for ever, where they were kept."""
    monkeypatch.setitem(compiler_module.LIMITS, "max_lexer_states", 60)
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    wanted = StructuredOutputs.of({"regex": "[a-z]{200}"})
    full = compiler.prepare(wanted)()
    while tokens := allowed(full.masks(())[0]):
        full.advance(tokens[:1])
    assert not compiler.is_prepared(wanted)
    assert allowed(compiler.prepare(wanted)().masks(())[0])
    assert compiler.is_prepared(wanted)


def test_a_grammar_is_compiled_anew_after_so_many_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr(compiled_module, "MAX_TOKENS", 100)
    compiler = GrammarCompiler(lambda: grammar_vocabulary(tokenizer, 4096))
    wanted = StructuredOutputs.of({"regex": "[a-z]*"})
    first = compiler.prepare(wanted)
    before = compiler.kept_bytes
    one = first()
    for _ in range(100):
        assert compiler.prepare(wanted) is first
        one.advance(allowed(one.masks(())[0])[5:6])
    assert compiler.kept_bytes > before
    assert not compiler.is_prepared(wanted)
    assert compiler.prepare(wanted) is not first


@pytest.mark.parametrize(
    "wanted",
    [{"json": {"$ref": "#"}}, {"regex": "a[^\\s\\S]"}, {"grammar": "start: start"}],
    ids=str,
)
def test_what_no_text_matches_is_refused_as_that(compiler, wanted):
    with pytest.raises(InvalidRequestError, match="no text matches it"):
        compiler.prepare(StructuredOutputs.of(wanted))
