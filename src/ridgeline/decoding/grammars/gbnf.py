"""GBNF, the grammars of llama.cpp, as llguidance's Lark."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_TOKEN = re.compile(r"!?<\[|!?<[^<>\s]+>")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*', re.DOTALL)


def is_gbnf(source: str) -> bool:
    """Whether a grammar is GBNF: its rules are written with ``::=``, which Lark does not know."""
    return _RULE.search(source) is not None


def lark_from_gbnf(source: str) -> str:
    """The same grammar in Lark.

    Raises:
        ValueError: it is not GBNF, or has what Lark cannot say.
    """
    if _TOKEN.search(_QUOTED.sub("", source)):
        raise ValueError("it is GBNF with tokens (<…>), which are not supported; write Lark.")
    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, _QUOTED.sub(_without_operators, source)))
    except RecursionError:
        raise ValueError("it is GBNF that is nested too deep.") from None
    except Exception as error:  # the translator raises plain exceptions
        raise ValueError(f"it was read as GBNF: {error}") from error


def _without_operators(quoted: re.Match[str]) -> str:
    """A class of characters in which ``&&`` and ``~~`` are characters, as they are in GBNF."""
    text = quoted[0]
    return text.replace("&&", r"\x26&").replace("~~", r"\x7e~") if text[0] == "[" else text


def _character(escape: re.Match[str]) -> str:
    """Code points as characters, where these mean nothing to Lark; the translator garbles them."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"it is GBNF with {escape[0]}, which is no character.")
    character = chr(code)
    return character if character.isalnum() or code > 0x7F else f"\\x{code:02x}"
