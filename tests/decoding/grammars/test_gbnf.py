"""llama.cpp's grammars mean the same here: Python's `re` and JSON say what they match."""

import json
import random
import re

import pytest
from tests.decoding.grammars.conftest import random_walk

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars.gbnf import is_gbnf

JSON = r"""
# a JSON object
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
MATCHED = {  # grammar: the same as a pattern
    'root ::= "yes" | "no"': "yes|no",
    'root ::= [a-c]{2,4} "-" num\nnum ::= [0-9]+': "[a-c]{2,4}-[0-9]+",
    'root ::= (digit | letter){3} "!"?\ndigit ::= [0-9]\nletter ::= [^0-9\\x00-\\x20\\x7f]':
        r"[^\x00-\x20\x7f]{3}!?",
    'root ::= "\\u00e9" [\\u0061-\\u0063]+': "é[a-c]+",
    'root ::= "a\\"b\\\\" "/" [/\\]x]': r'a"b\\/[/\]x]',
    'root ::= move (" " move){1,2}\nmove ::= piece? [a-h] [1-8] "+"?\npiece ::= [KQ]  # a comment':
        "([KQ]?[a-h][1-8][+]?)( ([KQ]?[a-h][1-8][+]?)){1,2}",
    'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]{1,2}':
        r"([0-9]{1,2}([-+*/][0-9]{1,2})*=[0-9]{1,2}\n)+",
}  # fmt: skip


def texts(compiler, tokenizer, grammar, count=15):
    wanted = StructuredOutputs.of({"grammar": grammar})
    for seed in range(count):
        constraint = compiler.prepare(wanted)()
        tokens = random_walk(constraint, tokenizer, random.Random(seed), max_tokens=80)
        if tokens is not None:
            yield tokenizer.decode(tokens)


@pytest.mark.parametrize("grammar", MATCHED)
def test_outputs_match(compiler, tokenizer, grammar):
    found = list(texts(compiler, tokenizer, grammar))
    assert found
    for text in found:
        assert re.fullmatch(MATCHED[grammar], text, re.DOTALL), text


@pytest.mark.parametrize(
    ("grammar", "text", "matches"),
    [
        ('root ::= "yes" | "no"', "no", True),
        ('root ::= "yes" | "no"', "nope", False),
        ('root ::= "\\u00e9" [\\u0061-\\u0063]+', "éab", True),
        ("root ::= [a-z&&b]+", "a&b", True),
        ("root ::= [~~x]", "~", True),
        (JSON, '{"a": [1, -2.5e3, "x\\u00e9"], "b": {}}', True),
        (JSON, '{"a": [1,, 2]}', False),
        (JSON, "[1]", False),
    ],
)  # fmt: skip
def test_what_may_be_written(compiler, tokenizer, grammar, text, matches):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    constraint = compiler.prepare(StructuredOutputs.of({"grammar": grammar}))()
    assert (len(constraint.valid(tokens)) == len(tokens)) is matches


def test_the_json_grammar_writes_json(compiler, tokenizer):
    found = list(texts(compiler, tokenizer, JSON, count=30))
    assert len(found) > 10
    for text in found:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= missing', 'other ::= "a"', 'root ::= "a', "root ::= [a", 'root ::= ("a"',
        'root ::= "a"{2,', 'root ::= <[100]> "a"', "root ::= <think>", 'root ::= "\\ud800"',
        "root ::= " + "(" * 5000, 'root ::= "\\q"',
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused_in_a_sentence(compiler, grammar):
    with pytest.raises(InvalidRequestError, match=r"grammar was refused: .*GBNF") as info:
        compiler.prepare(StructuredOutputs.of({"grammar": grammar}))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "lark", ['start: "a" b\nb: "::="', 'start: "x"\n// root ::= y', "start: /a::=b/"]
)
def test_lark_is_not_taken_for_it(lark):
    assert not is_gbnf(lark)
