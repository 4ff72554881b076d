"""Patterns of texts that are listed, and of what a pattern does not match, where that is plain."""

import re
from collections.abc import Iterable

_ANY = "(?s:.)*"
_LITERAL = re.compile(r"\^([A-Za-z0-9_ /:@#%=,;'\"-]*)(\$?)")
_CLASS = re.compile(r"(\^?)(\[(?:[^\[\]\\]|\\.)+\]|\\[dswDSW])([+*]?)(\$?)", re.DOTALL)
_REPEATS = re.compile(r"[*+?{|]")


def literals_pattern(texts: Iterable[str]) -> str:
    """A pattern of these texts and no others."""
    return f"^({'|'.join(''.join(map(_escaped, text)) for text in texts)})$"


def pattern_without(texts: Iterable[str], *, as_prefixes: bool = False) -> str:
    """A pattern of all texts but these, or all that start with none of these."""
    tree: dict[str, object] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node[""] = True
    return f"^({_without(tree, as_prefixes)})$"


def _without(tree: dict[str, object], as_prefixes: bool) -> str:
    ends = "" in tree
    if ends and as_prefixes:
        return "[^\\s\\S]"
    following = {key: node for key, node in tree.items() if key}
    others = f"[^{''.join(map(_escaped, following))}]" if following else "(?s:.)"
    longer = [
        f"{_escaped(key)}({_without(node, as_prefixes)})"
        for key, node in following.items()
        if isinstance(node, dict) and not (as_prefixes and "" in node)
    ]
    return "|".join([*([] if ends else [""]), f"{others}{_ANY}", *longer])


def rejected_pattern(pattern: str) -> str | None:
    """What a pattern does not match, if it is a text at the start or one class of characters."""
    if found := _LITERAL.fullmatch(pattern):
        return pattern_without([found[1]], as_prefixes=not found[2])
    found = _CLASS.fullmatch(pattern)
    if not found:
        return None
    start, characters, repeat, end = found.groups()
    if characters[0] == "\\":
        others = characters.swapcase()
    else:
        others = f"[{characters[2:]}" if characters[1] == "^" else f"[^{characters[1:]}"
    if not start and not end:
        return None if repeat == "*" else f"^{others}*$"
    if start and end and repeat:
        return f"^({'|' if repeat == '+' else ''}{_ANY}{others}{_ANY})$"
    return None


def matches_name(pattern: str, name: str) -> bool | None:
    """Whether a pattern is found in a name; None where looking for it could take long."""
    if len(_REPEATS.findall(pattern)) > 1 or len(pattern) + len(name) > 256:
        return None
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except re.error:
        return None


def _escaped(character: str) -> str:
    if character.isalnum() or ord(character) > 0x7F:
        return character
    return f"\\x{ord(character):02x}"
