"""The decoder of a ``tokenizer.json``, compiled into stages that work on a stream of tokens.

``tokenizers`` decodes whole sequences; decoding a growing sequence again and again, or a window of
it, is either quadratic or wrong at the edges (a leading space is stripped once, a run of byte
tokens turns into U+FFFD as a whole when its last byte is invalid). Each decoder is therefore
restated here as a stage that is fed one token at a time and holds back exactly what a later token
can still change, so that the joined output equals the full decode by construction.

A stage before ``Fuse`` or ``ByteLevel`` sees tokens; a stage after it sees pieces of one text.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.core.errors import TokenizerError
from ridgeline.text.decoding_stages import (
    ByteFallback,
    ByteLevel,
    Metaspace,
    PerToken,
    ReplaceText,
    SpaceJoin,
    Stage,
    StripText,
    Suffix,
    WordPiece,
    byte_level_bytes,
    byte_of_token,
    strip_left,
)

StageFactory = Callable[[], Stage]


class DecoderPlan:
    """How to decode with one tokenizer: an immutable list of stage factories.

    ``stages()`` makes the state for one stream; ``token_bytes`` decodes one token out of context.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self._factories: list[StageFactory] = []
        self._maps: list[Callable[[str], str]] = []
        self._byte_level = False
        self._byte_fallback = False
        self._fused = False
        if decoder is None:
            self._factories.append(SpaceJoin)
        else:
            self._add(decoder)

    @classmethod
    def from_json(cls, state: bytes | str | None) -> "DecoderPlan":
        """Compile the JSON of a decoder; TokenizerError if a kind of decoder is not known."""
        try:
            return cls(None if state is None else json.loads(state))
        except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
            raise TokenizerError("The decoder in tokenizer.json is damaged.") from error

    def stages(self) -> list[Stage]:
        """Make fresh state for one stream."""
        return [factory() for factory in self._factories]

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that a token stands for, whatever comes before and after it."""
        if self._byte_fallback and (byte := byte_of_token(token)) is not None:
            return bytes([byte])
        if self._byte_level:
            return byte_level_bytes(token)
        for apply in self._maps:
            token = apply(token)
        return token.encode("utf-8", "replace")

    def _per_token(self, apply: Callable[[str], str]) -> None:
        self._factories.append(lambda: PerToken(apply))
        self._maps.append(apply)

    def _add(self, decoder: Mapping[str, Any]) -> None:
        kind = decoder["type"]
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._add(part)
        elif kind == "ByteLevel":
            self._factories.append(ByteLevel)
            self._byte_level = self._fused = True
        elif kind == "Fuse":
            self._fused = True
        elif kind == "ByteFallback":
            self._factories.append(ByteFallback)
            self._byte_fallback = True
        elif kind == "Replace":
            self._add_replace(decoder["pattern"], decoder["content"])
        elif kind == "Strip":
            self._add_strip(decoder["content"], decoder["start"], decoder["stop"])
        elif kind == "Metaspace":
            mark = str(decoder["replacement"])
            drops = decoder.get("prepend_scheme", "always") != "never"
            self._factories.append(lambda: Metaspace(mark, drops))
            self._maps.append(lambda token: token.replace(mark, " "))
        elif kind == "WordPiece":
            prefix, cleanup = str(decoder["prefix"]), bool(decoder["cleanup"])
            self._factories.append(lambda: WordPiece(prefix, cleanup))
            self._maps.append(lambda token: token.removeprefix(prefix))
        elif kind == "BPEDecoder":
            suffix = str(decoder["suffix"])
            self._factories.append(lambda: Suffix(suffix))
            self._maps.append(lambda token: token.replace(suffix, " "))
        else:
            raise TokenizerError(f"The decoder type {str(kind)[:40]!r} is not supported.")

    def _add_replace(self, pattern: Mapping[str, str], content: str) -> None:
        if "String" in pattern:
            old = str(pattern["String"])
            if not old:
                raise TokenizerError("A Replace decoder with an empty pattern is not supported.")
            if self._fused and len(old) > 1:
                self._factories.append(lambda: ReplaceText(old, content))
            else:
                self._per_token(lambda token: token.replace(old, content))
            return
        raise TokenizerError("A Replace decoder with a regular expression is not supported.")

    def _add_strip(self, content: str, start: int, stop: int) -> None:
        if len(content) != 1 or start < 0:
            raise TokenizerError("The Strip decoder in tokenizer.json is damaged.")
        if stop != 0:  # the reference implementation panics on short tokens
            raise TokenizerError("A Strip decoder that strips on the right is not supported.")
        if self._fused:
            self._factories.append(lambda: StripText(content, start))
        else:
            self._factories.append(
                lambda: PerToken(lambda token: strip_left(token, content, start))
            )
