"""The outermost layer: who may come in, and one log line for each who came."""

import logging
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.server.config import is_loopback
from ridgeline.server.context import Call, Server
from ridgeline.server.continuation import ROUTER_KEY, STATE_PATH, routed
from ridgeline.server.errors import ApiError, ApiFamily, family_of
from ridgeline.server.ids import new_id
from ridgeline.server.keys import Caller
from ridgeline.server.logs import log_request
from ridgeline.server.origins import ANY, Origins
from ridgeline.server.replies import encode

_log = logging.getLogger(__name__)

PUBLIC_PATH = b"/health"
_SAFE_METHODS = ("GET", "HEAD")
_MAX_ID_CHARS = 128
_MAX_NAMES, _MAX_NAME_CHARS = 32, 80  # of ignored fields, in a header
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


class Access:
    """Refuses everything without a key, on the path as it was sent, but a plain ``GET /health``.

    Also refused: calls from web pages of other origins, unless they are allowed, and without keys
    any Host that is not this machine (a page could have its name point here).
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._origins = Origins(server.config.allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers)
        started_s = time.monotonic()
        status = 0
        call: Call | None = None

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    *_id_headers(scope, request_id),
                    *_HEADERS,
                    *_warnings(call),
                    *_cache_state(call),
                    *self._cors(headers),
                ]
            await send(message)

        try:
            caller = self._admit(scope, headers)
            call = Call(
                server=self._server,
                request_id=request_id,
                caller=caller,
                path="other",
                headers=headers,
                arrival_s=started_s,
            )
            if self._is_preflight(scope, headers):
                await _preflight(headers, observed_send)
            else:
                scope.setdefault("state", {})["call"] = call
                await self._app(scope, receive, observed_send)
        except ApiError as error:
            await _refuse(error, scope, request_id, observed_send)
        finally:
            seconds = time.monotonic() - started_s
            self._server.metrics.http(call.path if call else "refused", scope["method"], status)
            if call is not None and call.outcome == "ok" and status >= 400:
                call.outcome = f"error {status}"
            is_quiet = call is not None and call.is_probe and call.outcome == "ok"
            if self._server.config.log_requests and not is_quiet:
                path = scope["path"] if status == 404 and call and call.path == "other" else None
                log_request(scope["method"], call, request_id, status, seconds, path)
            self._server.tracing.record(call, status, started_s, headers)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Who calls; ApiError 401 or 403 if nobody may."""
        keys = self._server.keys
        is_public = scope["raw_path"] == PUBLIC_PATH and scope["method"] in _SAFE_METHODS
        caller = keys.caller(headers)
        if caller is None and scope["raw_path"] == STATE_PATH:
            routed(headers, self._server.router_key)
            is_public = ROUTER_KEY in headers
        if caller is None:
            if not (is_public or self._is_preflight(scope, headers)):
                twice = b"authorization" in headers and b"x-api-key" in headers
                end = ", the same one where it is sent twice." if twice else "."
                raise ApiError(401, f"A valid key is needed{end}", code="invalid_api_key")
            return Caller(tenant="")
        if keys.is_open and not _is_local_host(headers.get(b"host", b"")):
            raise ApiError(403, "The Host header does not name this machine.")
        if b"origin" in headers and not _same_origin(headers):
            self._check_origin(headers)
        return caller

    def _is_preflight(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        return scope["method"] == "OPTIONS" and self._origins.allows(headers.get(b"origin"))

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """ApiError 403 unless pages of the origin may call, in the way that this one does."""
        origin = headers[b"origin"]
        if not self._origins.allows(origin):
            raise ApiError(403, "Calls from this origin are not allowed (see --allow-origin).")
        # A browser adds the password that it keeps to the calls of any page.
        if _has_password(headers) and not self._origins.names(origin):
            raise ApiError(403, "Pages of this origin must send the key as a Bearer token.")

    def _cors(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        origin = headers.get(b"origin")
        if origin is None or not self._origins.allows(origin):
            return []
        exposed = (b"access-control-expose-headers", b"x-request-id, request-id, retry-after")
        if self._origins.allows_any:
            return [(b"access-control-allow-origin", ANY.encode()), exposed]
        return [(b"access-control-allow-origin", origin), exposed, (b"vary", b"Origin")]


async def _preflight(headers: dict[bytes, bytes], send: Callable[[Message], object]) -> None:
    """Allow whatever headers the page asks for: SDKs send some of their own."""
    asked = headers.get(b"access-control-request-headers", b"").split(b",")
    names = [name for each in asked if _HEADER_NAME.fullmatch(name := each.strip())]
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
        (b"access-control-allow-headers", b", ".join(names)),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})  # type: ignore[misc]
    await send({"type": "http.response.body", "body": b""})  # type: ignore[misc]


async def _refuse(error: ApiError, scope: Scope, request_id: str, send: Send) -> None:
    body = encode(error.body(family_of(scope["raw_path"].decode("latin-1")), request_id))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error.headers,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The caller's ``x-request-id`` if it is short and plain, else a new one."""
    given = headers.get(b"x-request-id", b"")
    is_plain = given.replace(b"-", b"").replace(b"_", b"").isalnum()
    return given.decode() if is_plain and len(given) <= _MAX_ID_CHARS else new_id("req-")


def _id_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    """The request's id under the name that its family of clients reads."""
    found = [(b"x-request-id", request_id.encode())]
    if family_of(scope["raw_path"].decode("latin-1")) is ApiFamily.ANTHROPIC:
        found.append((b"request-id", request_id.encode()))
    return found


def _warnings(call: Call | None) -> list[tuple[bytes, bytes]]:
    if call is None or not call.ignored_fields:
        return []
    names = [_NOT_IN_NAMES.sub("?", name[:_MAX_NAME_CHARS]) for name in call.ignored_fields]
    if len(names) > _MAX_NAMES:
        names[_MAX_NAMES:] = [f"and {len(names) - _MAX_NAMES} more"]
    return [(b"x-ridgeline-warning", f"ignored fields: {', '.join(names)}".encode())]


def _cache_state(call: Call | None) -> list[tuple[bytes, bytes]]:
    """Whether the answer is one that was kept, and which."""
    if call is None or not call.cache_hits:
        return []
    ids = [hit for hit in call.cache_hits if hit is not None]
    if not ids:
        return [(b"x-ridgeline-cache", b"miss")]
    share = "" if len(ids) == len(call.cache_hits) else f" {len(ids)} of {len(call.cache_hits)}"
    return [(b"x-ridgeline-cache", f"hit{share}; id={ids[0]}".encode())]


def _is_local_host(host: bytes) -> bool:
    name = host.decode("latin-1")
    name, colon, port = name.rpartition(":")
    if not colon or not port.isdigit():
        name = host.decode("latin-1")
    return is_loopback(name)


def _has_password(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"authorization", b"").partition(b" ")[0].lower() == b"basic"


def _same_origin(headers: dict[bytes, bytes]) -> bool:
    host = headers.get(b"host")
    return host is not None and headers[b"origin"] in (b"http://" + host, b"https://" + host)
