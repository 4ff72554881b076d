"""The single decoders, each as a stage that holds back what a later token can still change."""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_REPLACEMENT = "\ufffd"


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_LEVEL_BYTES = _byte_level_table()


@lru_cache(maxsize=1 << 16)
def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token outside the alphabet is its own UTF-8."""
    try:
        return bytes([BYTE_LEVEL_BYTES[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def byte_of_token(token: str) -> int | None:
    """Return the value of a byte-fallback token such as ``<0x0A>``, None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def strip_left(text: str, content: str, limit: int) -> str:
    """Drop up to ``limit`` leading characters ``content``."""
    cut = 0
    while cut < min(limit, len(text)) and text[cut] == content:
        cut += 1
    return text[cut:]


class Stage(ABC):
    """One step of decoding; holds the state of one stream."""

    @abstractmethod
    def feed(self, item: str) -> Sequence[str]:
        """Take one token (or piece of text); return what is settled."""

    def end(self) -> Sequence[str]:
        """Return what was held back; the stream is over."""
        return ()

    def settle(self, *, keeps_half: bool) -> Sequence[str]:
        """The context is over: return the text that was held back, which is not given out again.

        With ``keeps_half`` what follows may complete half a character at its end.
        """
        return ()


class PerToken(Stage):
    """A decoder without memory: the same function on every token."""

    def __init__(self, apply: Callable[[str], str]) -> None:
        self._apply = apply

    def feed(self, item: str) -> Sequence[str]:
        return (self._apply(item),)


class ByteLevel(Stage):
    """Bytes to text; holds back the start of a UTF-8 sequence that may still be completed."""

    def __init__(self) -> None:
        self._decoder = _utf8_decoder()
        self._has_half = False  # the context's, for which its own text has U+FFFD already

    def feed(self, item: str) -> Sequence[str]:
        return self._shown(self._decoder.decode(byte_level_bytes(item)))

    def end(self) -> Sequence[str]:
        return self._shown(self._decoder.decode(b"", True))

    def settle(self, *, keeps_half: bool) -> Sequence[str]:
        if not keeps_half:
            return self.end()
        self._has_half = bool(self._decoder.getstate()[0])
        return ()

    def _shown(self, text: str) -> Sequence[str]:
        if text and self._has_half:
            self._has_half = False
            text = text.removeprefix(_REPLACEMENT)
        return (text,) if text else ()


class ByteFallback(Stage):
    """``<0xNN>`` tokens to text; holds back a whole run of them.

    The reference decoder turns *every* byte of a run into U+FFFD when the run as a whole is not
    UTF-8, so nothing in the run is settled before a token ends it.
    """

    def __init__(self) -> None:
        self._run = bytearray()
        self._num_half_bytes = 0  # the context's, at the start of the run

    def feed(self, item: str) -> Sequence[str]:
        byte = byte_of_token(item)
        if byte is not None:
            self._run.append(byte)
            return ()
        return (*self.end(), item)

    def end(self) -> Sequence[str]:
        if not self._run:
            return ()
        run, num_half_bytes = bytes(self._run), self._num_half_bytes
        self._run.clear()
        self._num_half_bytes = 0
        try:
            return (run.decode("utf-8"),)
        except UnicodeDecodeError:
            return (_REPLACEMENT,) * (len(run) - num_half_bytes)

    def settle(self, *, keeps_half: bool) -> Sequence[str]:
        decoder = _utf8_decoder()
        decoder.decode(bytes(self._run))
        settled = self.end()
        if keeps_half:
            self._run += decoder.getstate()[0]
            self._num_half_bytes = len(self._run)
        return settled


class StripText(Stage):
    """Strip on the fused text: up to ``limit`` leading characters ``content``, once."""

    def __init__(self, content: str, limit: int) -> None:
        self._content, self._left = content, limit

    def feed(self, item: str) -> Sequence[str]:
        if not self._left or not item:
            return (item,)
        rest = strip_left(item, self._content, self._left)
        self._left = 0 if rest else self._left - len(item)
        return (rest,) if rest else ()


class Metaspace(Stage):
    """``▁`` to a space; the first token loses its marks unless the prepend scheme is "never"."""

    def __init__(self, mark: str, drops_first: bool) -> None:
        self._mark, self._drop = mark, drops_first

    def feed(self, item: str) -> Sequence[str]:
        drop, self._drop = self._drop, False
        return (item.replace(self._mark, "" if drop else " "),)


class SpaceJoin(Stage):
    """A tokenizer without a decoder: the tokens with spaces between them."""

    def __init__(self) -> None:
        self._first = True

    def feed(self, item: str) -> Sequence[str]:
        first, self._first = self._first, False
        return (item if first else " " + item,)


_WORDPIECE_CLEANUP = (
    *((" " + mark, mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((" " + end, end) for end in ("'s", "'ve", "'re")),
)


class WordPiece(Stage):
    """BERT's decoder: words joined by spaces, continuations without their prefix."""

    def __init__(self, prefix: str, cleanup: bool) -> None:
        self._prefix, self._cleanup, self._first = prefix, cleanup, True

    def feed(self, item: str) -> Sequence[str]:
        if self._first:
            self._first = False
        elif item.startswith(self._prefix):
            item = item.replace(self._prefix, "", 1)
        else:
            item = " " + item
        if self._cleanup:
            for old, new in _WORDPIECE_CLEANUP:
                item = item.replace(old, new)
        return (item,)


class Suffix(Stage):
    """The ``</w>`` of BPE with end-of-word suffixes: a space, but nothing after the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def feed(self, item: str) -> Sequence[str]:
        held, self._held = self._held, item
        return () if held is None else (held.replace(self._suffix, " "),)

    def end(self) -> Sequence[str]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)

    def settle(self, *, keeps_half: bool) -> Sequence[str]:
        held = self._held
        settled = self.end()
        if held is not None:  # the space comes with the next token
            self._held = self._suffix if held.endswith(self._suffix) else ""
        return settled


class ReplaceText(Stage):
    """Replace on the fused text; holds back what may be the start of the pattern."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._tail = old, new, ""

    def feed(self, item: str) -> Sequence[str]:
        *done, rest = (self._tail + item).split(self._old)
        keep = min(len(rest), len(self._old) - 1)
        while keep and not self._old.startswith(rest[len(rest) - keep :]):
            keep -= 1
        self._tail = rest[len(rest) - keep :]
        return (self._new.join([*done, rest[: len(rest) - keep]]),)

    def end(self) -> Sequence[str]:
        tail, self._tail = self._tail, ""
        return (tail,) if tail else ()

    def settle(self, *, keeps_half: bool) -> Sequence[str]:
        return self.end()
