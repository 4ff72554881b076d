"""A client's request as the router sees it: what to send on, and what the choice goes by."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ridgeline.fleet.policies import Wanted
from ridgeline.fleet.prefixes import BYTES_PER_TOKEN, prefix_blocks
from ridgeline.fleet.upstream import UNREADABLE
from ridgeline.server.app import api_operations
from ridgeline.server.continuation import (
    HAND_OVER,
    HEADERS,
    ROUTER_KEY,
    STATE_BYTES,
    STREAM_SEED,
)

_OPERATIONS = api_operations()
GENERATING = frozenset(each.path for each in _OPERATIONS if each.generates)
CONTINUED = frozenset(each.path for each in _OPERATIONS if each.is_continued)
# What one engine keeps is asked of that engine.
KEPT = (
    "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/responses", "/v1/caches", "/admin/",
)  # fmt: skip
_TENANTS = "/admin/tenants/"
_USUAL_OUTPUT_TOKENS = 128
_SOMETHING = Wanted(prompt_tokens=1, output_tokens=1)
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"expect", b"content-length",
})  # fmt: skip


class _Google(msgspec.Struct):
    cached_content: str | None = None


class _Extra(_Google):
    google: _Google | None = None


class _Body(msgspec.Struct):
    """As much of a body as is asked for here."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: str | None = None
    cached_content: str | None = None
    extra_body: _Extra | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None


_DECODER = msgspec.json.Decoder(_Body)


def end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers that are passed on, in either direction: not those of one connection, which
    ``Connection`` may name more of (RFC 9110, 7.6.1)."""
    named = (name for key, value in headers if key == b"connection" for name in value.split(b","))
    left_out = _HOP_BY_HOP.union(name.strip().lower() for name in named)
    return [each for each in headers if each[0] not in left_out]


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """A request that is whole. ``blocks`` are the keys of its prompt (`prefix_blocks`);
    ``names_cache``: it goes on from a cached content; ``is_one_stream``: one output is streamed.

    ``seed`` is for sampling where the request has none, so that every engine draws the same.
    """

    method: str
    path: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    wanted: Wanted = _SOMETHING
    blocks: list[bytes] = field(default_factory=list)
    names_cache: bool = False
    is_one_stream: bool = False

    def __post_init__(self) -> None:
        if not self.generates or self.method != "POST":
            return
        fields = dict(self.headers)
        try:
            body = _DECODER.decode(self.body)
        except UNREADABLE:
            return  # which the engine will say better
        extra = body.extra_body or _Extra()
        places = (body, extra, extra.google or _Google())
        self.names_cache = any(each.cached_content for each in places)
        prompt = bytes(body.messages) or bytes(body.prompt)
        is_one = body.n in (None, 1) and body.best_of in (None, 1)
        self.is_one_stream = bool(body.stream) and is_one
        caller = fields.get(b"authorization", b"") + b"\0" + fields.get(b"x-api-key", b"")
        salt = f"{body.model}\0{body.cache_salt}\0".encode("utf-8", "surrogatepass") + caller
        self.blocks = prefix_blocks(prompt, salt)
        limits = (body.max_completion_tokens, body.max_tokens)
        limit = next((each for each in limits if each and each > 0), _USUAL_OUTPUT_TOKENS)
        session = fields.get(b"x-session-id") or (self.blocks[0] if self.blocks else caller)
        self.wanted = Wanted(
            prompt_tokens=max(1, len(prompt) // BYTES_PER_TOKEN),
            output_tokens=min(limit, _USUAL_OUTPUT_TOKENS),
            session=session,
        )

    @property
    def generates(self) -> bool:
        """Whether the model runs for it."""
        return self.path in GENERATING

    @property
    def is_continued(self) -> bool:
        """Whether its stream can go on elsewhere."""
        return self.path in CONTINUED

    @property
    def is_kept(self) -> bool:
        """Whether it is about what one engine keeps."""
        return self.path.startswith(KEPT)

    @property
    def is_for_first(self) -> bool:
        """Whether only the engine that keeps things can answer it."""
        return self.is_kept or self.names_cache

    @property
    def is_for_all(self) -> bool:
        """Whether every engine has to do it."""
        return self.method == "DELETE" and self.path.startswith(_TENANTS)

    @property
    def may_repeat(self) -> bool:
        """Whether to send it twice changes nothing."""
        return self.method in ("GET", "HEAD") or not self.is_kept

    @property
    def may_be_handed_over(self) -> bool:
        """Whether an engine may end it with its first token, for another one to go on."""
        goes_on = self.is_one_stream and self.is_continued and self.wanted.output_tokens > 1
        return goes_on and not self.is_for_first

    def encoded(
        self, token: bytes | None, state: bytes | None = None, *, hands_over: bool = False
    ) -> bytes:
        """The request as an engine gets it, from a router that shows ``token``.

        ``state``: how far another engine has come with its stream; ``hands_over``: it ends with its
        first token.
        """
        lines = [b"%b %b HTTP/1.1\r\n" % (self.method.encode(), self.target)]
        lines += [
            b"%b: %b\r\n" % (name, value)
            for name, value in end_to_end(self.headers)
            if name not in HEADERS
        ]
        body = self.body
        if token is not None and self.generates:
            ours: Mapping[bytes, bytes] = {ROUTER_KEY: token, STREAM_SEED: b"%d" % self.seed}
            if hands_over:
                ours = {**ours, HAND_OVER: b"1"}
            if state is not None:
                ours = {**ours, STATE_BYTES: b"%d" % len(state)}
                body = state + body
            lines += [b"%b: %b\r\n" % each for each in ours.items()]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        return b"".join((*lines, body))
