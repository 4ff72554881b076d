"""Streams that go on in another engine: what a router tells a server, and hears from it.

A router that has the same key file as the server (``--router-key-file``) sends, in headers, a seed
for requests that have none, so that every engine would draw the same tokens. The server then marks
each event of a stream with the tokens that are behind it, in a comment that the router takes out.
When the server is lost, the router makes a `StreamState` of the marks, and sends it before the body
of the same request to another one, whose stream goes on with the next event.

A router may also ask that a stream ends once each output has begun, so that it goes on elsewhere:
it ends with a comment then, `HANDED_OVER`, and what was computed stays for others to read.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from ridgeline.core.philox import derive_seed
from ridgeline.core.request import CompletionChunk
from ridgeline.core.sampling_params import MAX_SEED, MAX_TOKENS
from ridgeline.server.errors import ApiError, bad_request

ROUTER_KEY = b"x-ridgeline-router-key"
STREAM_SEED = b"x-ridgeline-stream-seed"
STATE_BYTES = b"x-ridgeline-state-bytes"
HAND_OVER = b"x-ridgeline-hand-over"
HEADERS = (ROUTER_KEY, STREAM_SEED, STATE_BYTES, HAND_OVER)
MARK = b":ridgeline "
HANDED_OVER = b":ridgeline-handed-over\n\n"
STATE_PATH = b"/fleet/state"


class ChoiceState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The tokens of one choice that are behind the events which the client has."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]] = []
    is_finished: bool = False


class StreamState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How far a stream has come: its id and creation time, and its choices by index."""

    id: str
    created: int
    choices: dict[int, ChoiceState]

    def choice(self, index: int) -> ChoiceState:
        """That of a choice, of which the client may have nothing."""
        return self.choices.get(index) or ChoiceState()


_DECODER = msgspec.json.Decoder(StreamState)


class HandedOverError(Exception):
    """Every output has begun or ended; another server goes on."""


class PriorChunk(CompletionChunk, frozen=True, kw_only=True, array_like=True):
    """A token that the client has, from another server: read again, and not sent again."""


@dataclass(slots=True)
class Routed:
    """A call that came through a router. ``seed`` is for its requests that have none.
    ``hands_over``: its stream ends once each output has begun."""

    seed: int
    state_bytes: int = 0
    state: StreamState | None = None
    hands_over: bool = False
    _marks: list[bytes] = field(default_factory=list)

    def seed_of(self, prompt: int) -> int:
        """The seed of the prompt with this index, if the request has none."""
        return derive_seed(self.seed, prompt)

    def note(self, choice: int, token_ids: Sequence[int]) -> None:
        """Tokens were made, which the next event marks."""
        if token_ids:
            self._marks.append(b"%b%d %b\n" % (MARK, choice, _joined(token_ids)))

    def marked(self, event: bytes) -> bytes:
        """An event with its marks."""
        marks, self._marks = self._marks, []
        return b"".join((*marks, event))

    def take_state(self, body: bytes) -> bytes:
        """Take the state off the beginning of a body.

        Raises:
            ApiError: it is not one.
        """
        if self.state_bytes:
            try:
                self.state = _DECODER.decode(body[: self.state_bytes])
            except msgspec.DecodeError as error:
                raise bad_request(f"The state of the stream cannot be read: {error}.") from None
        return body[self.state_bytes :]


def _joined(token_ids: Sequence[int]) -> bytes:
    return ",".join(map(str, token_ids)).encode()


def router_token(key: bytes) -> bytes:
    """What a router with this key shows: not the key itself."""
    return hashlib.sha256(b"ridgeline router\0" + key).hexdigest().encode()


def routed(headers: Mapping[bytes, bytes], key: bytes | None) -> Routed | None:
    """What the router says of a call; ``None`` of one that came without.

    Raises:
        ApiError: 403 for a router's headers without its key, 400 for what no router sends.
    """
    if not any(name in headers for name in HEADERS):
        return None
    shown = headers.get(ROUTER_KEY, b"")
    if key is None or not hmac.compare_digest(shown, router_token(key)):
        raise ApiError(403, "Only a router with this server's key may send x-ridgeline headers.")
    seed = _number(headers, STREAM_SEED, MAX_SEED)
    state_bytes = _number(headers, STATE_BYTES, MAX_TOKENS)
    hands_over = bool(_number(headers, HAND_OVER, 1))
    if hands_over and state_bytes:
        raise bad_request("A stream that goes on here is not handed over.")
    return Routed(seed, state_bytes, hands_over=hands_over)


def _number(headers: Mapping[bytes, bytes], name: bytes, most: int) -> int:
    text = headers.get(name, b"0")
    if not text.isdigit() or len(text) > 20 or int(text) > most:
        raise bad_request(f"{name.decode()} is not a number.")
    return int(text)
