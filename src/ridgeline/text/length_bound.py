"""The fewest tokens that a text can have, by its characters alone."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from ridgeline.core.rounding import ceil_div

_SPACES = tuple(char for char in map(chr, range(0x3001)) if char.isspace())
_COMPOSED_CHARS = 4  # the longest canonical decomposition of a character
# Characters that become one. Normalizers that are not here may drop any number of them.
_SHRINKING = {
    "ByteLevel": 1,
    "Lowercase": 1,
    "NFC": _COMPOSED_CHARS,
    "NFD": 1,
    "NFKC": _COMPOSED_CHARS,
    "NFKD": 1,
    "Prepend": 1,
    "Strip": 1,
}
_KEEP_TEXT = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
_DROP_SPACES = {"Strip", "Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBound:
    """A token stands for ``chars_per_token`` characters at the most.

    White space may stand for nothing, and is not counted then (``counts_spaces``).
    """

    chars_per_token: int
    counts_spaces: bool

    def least_tokens(self, text: str) -> int:
        """The tokens of ``text`` are at least so many."""
        chars = len(text)
        if not self.counts_spaces:
            chars -= sum(map(text.count, _SPACES))
        return ceil_div(chars, self.chars_per_token)


def length_bound(backend: Backend) -> LengthBound | None:
    """The bound of a tokenizer; ``None`` where any text may come to no token.

    That is so where a normalizer or a pre-tokenizer drops text, or where one unknown token stands
    for a word or a run of characters (WordPiece, Unigram, BPE with ``fuse_unk``).
    """
    try:
        normalizers = _steps(backend.normalizer, "normalizers")
        shrinking = math.prod(map(_shrinking, normalizers))
    except _DropsTextError:
        return None
    steps = _steps(backend.pre_tokenizer, "pretokenizers")
    kinds = {step["type"] for step in (*normalizers, *steps)}
    if any(not _keeps_text(step) for step in steps) or not _knows_all(backend, kinds):
        return None
    added = backend.get_added_tokens_decoder().values()
    spell: Callable[[str], str] = getattr(backend.normalizer, "normalize_str", str)
    spelt = (spell(token.content) for token in added if token.normalized)
    longest = max(map(len, (*backend.get_vocab(with_added_tokens=True), *spelt)))
    strips = any(token.lstrip or token.rstrip for token in added)
    return LengthBound(
        chars_per_token=math.ceil(longest * shrinking),
        counts_spaces=not strips and not kinds & _DROP_SPACES,
    )


class _DropsTextError(Exception):
    pass


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list of what it does."""
    if part is None:
        return []
    found: list[dict[str, Any]] = []
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step[name]
        else:
            found.append(step)
    return found


def _shrinking(step: Mapping[str, Any]) -> float:
    if step["type"] == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        if old and new.split() == [new]:  # white space might be dropped later
            return max(1.0, len(old) / len(new))
    if step["type"] not in _SHRINKING:
        raise _DropsTextError
    return _SHRINKING[step["type"]]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEP_TEXT | _DROP_SPACES


def _knows_all(backend: Backend, kinds: set[str]) -> bool:
    """Whether each character comes to a token of its own, if to no longer one."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    known = model.token_to_id
    if model.byte_fallback:
        return all(known(f"<0x{byte:02X}>") is not None for byte in range(256))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return "ByteLevel" in kinds and all(known(char) is not None for char in alphabet)
