"""Patterns of module names: as ``re.match``, without its bombs."""

import re
import time

import pytest

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.quant.patterns import Pattern, name_matcher

PATTERNS = [
    r".*mlp.*", r".*lm_head", r"model\.layers\.\d+\.(mlp|self_attn)\..*_proj$", "a|b", r"(a+)+b",
    r"^model.layers.[0-9].*", r".*(gate|up)_proj", r"x?y*z", r".*\.experts\.\d+\.w[123]$", "",
    r"[^a]b", r"((a|b)*c)+d?$", r"(?:a|bc)[a-c_]+\w\s?$", r"a$b", r"(^a|b)c",
]  # fmt: skip
NAMES = [
    "model.layers.3.mlp.gate_proj", "lm_head", "model.layers.12.self_attn.q_proj", "a", "b", "bc",
    "aaaab", "z", "yyz", "xyz", "x.experts.12.w3", "cb", "ab", "abcabc", "abcd", "", "bcc_a", "ac",
]  # fmt: skip


def test_agrees_with_re_match() -> None:
    for pattern in PATTERNS:
        for name in NAMES:
            assert Pattern(pattern).matches(name) == bool(re.match(pattern, name)), (pattern, name)


def test_bombs_are_harmless() -> None:
    started = time.perf_counter()
    for bomb in ("(a+)+$b", "(((a*)*)*)*" * 15 + "b", "(a|a)*" * 20 + "c", ".*" * 60 + "x"):
        assert not Pattern(bomb).matches("a" * 250)
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "text", ["(?!a)b", "a{2}", "(a", "a)", "[a", "*a", "a**", "\\1", "\\", "a\n", "x" * 201, "(((("]
)
def test_what_it_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedModelError, match="pattern"):
        Pattern(text)


def test_names_without_prefix_are_literal() -> None:
    assert name_matcher("a.b")("a.b")
    assert not name_matcher("a.b")("axb")
    assert name_matcher("re:a.b")("axb")
