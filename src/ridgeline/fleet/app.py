"""The router's ASGI application: its own few routes, and the engines' behind them."""

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.fleet.autoscaler import Autoscaler
from ridgeline.fleet.cascade import Cascade
from ridgeline.fleet.control import FleetControl
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.forwarding import MOST_WHOLE_BYTES, Client, Forwarding
from ridgeline.fleet.request_log import UNLOGGED, RecordedClient, RequestLog
from ridgeline.fleet.requests import GENERATING, RoutedRequest
from ridgeline.server.body import ClientDisconnectedError, declared_length, read_body
from ridgeline.server.continuation import ROUTER_KEY
from ridgeline.server.errors import ApiError, family_of
from ridgeline.server.ids import new_id
from ridgeline.server.replies import encode

_JSON = (b"content-type", b"application/json")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_ANYONES = "/load"  # any key that an engine takes may read it
_ADMINS = "/admin/usage"  # and this the admin's alone
_ENGINES = "/admin/engines"


class _NewEngine(msgspec.Struct, forbid_unknown_fields=True):
    """``url``: of one that runs; without it one is started."""

    url: str | None = None


class RouterApp:
    """Answers ``/health``, ``/ready``, ``/metrics``, ``/fleet/state`` and ``/admin/engines``; the
    rest is the engines'."""

    def __init__(
        self,
        control: FleetControl,
        scaler: Autoscaler | None,
        *,
        log: RequestLog | None = None,
        cascade: Cascade | None = None,
    ) -> None:
        self._router, self._control, self._scaler = control.router, control, scaler
        self._log, self._cascade = log, cascade

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_logged = self._log is not None and scope["path"] in GENERATING
        client = (RecordedClient if is_logged else Client)(scope, send)
        outcome = "refused"
        self._router.num_open += 1
        try:
            with self._router.bodies.share() as hold:
                outcome = await self._answer(scope, receive, client, hold)
        except ClientDisconnectedError:
            outcome = "disconnected"
        except ApiError as error:
            body = encode(error.body(family_of(scope["path"]), new_id("req-")))
            await client.whole(error.status, [_JSON, *error.headers], body)
        finally:
            self._router.num_open -= 1
            self._router.requests.labels(outcome).inc()

    async def _answer(
        self, scope: Scope, receive: Receive, client: Client, hold: Callable[[int], None]
    ) -> str:
        path, router = scope["path"], self._router
        if path == "/health":
            await client.whole(200, [_JSON], encode({"status": "ok"}))
            return "own"
        if path == "/ready":
            await self._ready(client)
            return "own"
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        limit = router.config.max_body_mib << 20
        declared_length(dict(headers), limit)
        if router.is_draining:
            raise ApiError(503, "The router is shutting down.", retry_after_s=1.0)
        query = scope["query_string"]
        body = await read_body(receive, limit=limit, on_bytes=hold)
        request = RoutedRequest(
            method=scope["method"],
            path=path,
            target=scope["raw_path"] + (b"?" + query if query else b""),
            headers=headers,
            body=body,
        )
        if path == "/metrics":
            if not await self._may(_ANYONES, request, client, receive):
                return "refused"
            await client.whole(200, [_TEXT], self._router.exposition())
            return "own"
        if path == "/fleet/state" and request.method == "GET":
            if not await self._may(_ANYONES, request, client, receive):
                return "refused"
            await client.whole(200, [_JSON], encode(self._state()))
            return "own"
        if path == _ENGINES or path.startswith(_ENGINES + "/"):
            if not await self._may(_ADMINS, request, client, receive):
                return "refused"
            await client.whole(200, [_JSON], encode(await self._change(request)))
            return "own"
        if path.startswith("/admin/") and not request.is_for_all:
            raise ApiError(501, "This is for a single engine: ask it itself.")
        if path.startswith("/fleet/"):
            raise ApiError(404, "There is no such route.")
        if request.is_for_all:
            return await self._ask_all(request, client)
        is_noted = isinstance(client, RecordedClient) and not (
            UNLOGGED in dict(headers) and await self._may(_ADMINS, request, None, receive)
        )
        outcome = await self._generate(request, client, receive)
        if self._log and isinstance(client, RecordedClient) and is_noted and outcome == "completed":
            self._log.note(request, client, has_seed=router.token is not None)
        return outcome

    async def _generate(self, request: RoutedRequest, client: Client, receive: Receive) -> str:
        """Have an engine answer, and the autoscaler know of it."""
        cascade = self._cascade if request.generates and request.method == "POST" else None
        if cascade is not None and (asked := cascade.small_request(request)) is not None:
            first, held = cascade.forwarding(asked)
            await self._forward(first, receive)
            left = await cascade.settle(held, request, client)
            if left is None:
                return "completed"
            request = left
        forwarding, scaler = Forwarding(self._router, request, client), self._scaler
        if scaler is None or not (request.generates and request.method == "POST"):
            return await self._forward(forwarding, receive)
        arrival_s = asyncio.get_running_loop().time()
        prompt_tokens, outcome = scaler.note_arrival(request), "refused"
        try:
            outcome = await self._forward(forwarding, receive)
        finally:
            if outcome != "refused" or forwarding.is_overload:
                scaler.note_answer(arrival_s, forwarding.times, is_whole=outcome == "completed")
            elif forwarding.times.first_s is None:
                scaler.take_back(arrival_s, prompt_tokens)
        return outcome

    async def _forward(self, forwarding: Forwarding, receive: Receive) -> str:
        """Until there is an answer, or nobody waits for it."""
        work = asyncio.create_task(forwarding.run())
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnectedError
            await work
            return forwarding.outcome
        finally:
            for task in (gone, work):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _ready(self, client: Client) -> None:
        router, now_s = self._router, asyncio.get_running_loop().time()
        engines = [
            {
                "url": e.pool.url,
                "up": e.takes_requests(now_s),
                "breaker": e.breaker.state,
                "reason": e.reason,
            }
            for e in router.engines
        ]
        is_ready = router.num_up > 0 and not router.is_draining
        body = encode({"status": "ready" if is_ready else "not ready", "engines": engines})
        headers = [_JSON] if is_ready else [_JSON, (b"retry-after", b"1")]
        await client.whole(200 if is_ready else 503, headers, body)

    async def _may(
        self, path: str, request: RoutedRequest, client: Client | None, receive: Receive
    ) -> bool:
        """Whether an engine lets the caller read what lies there: the router knows no keys but that
        which it shares with the engines. If not, a ``client`` has heard so."""
        token = self._router.token
        shown = dict(request.headers).get(ROUTER_KEY, b"")
        if token is not None and hmac.compare_digest(shown, token):
            return True
        asking = Asking()
        asked = RoutedRequest(
            method="GET", path=path, target=path.encode(), headers=request.headers, body=b""
        )
        await self._forward(Forwarding(self._router, asked, asking), receive)
        if asking.status != 200 and client is not None:
            await client.whole(asking.status, asking.headers, asking.body)
        return asking.status == 200

    def _state(self) -> dict[str, Any]:
        now_s = asyncio.get_running_loop().time()
        small = () if self._cascade is None else self._cascade.router.engines
        return {
            "engines": [_told(each, now_s) for each in self._router.engines],
            "cascade": [_told(each, now_s) for each in small],
            "starting": len(self._control.starting),
            "autoscaler": None if self._scaler is None else self._scaler.told(),
        }

    async def _change(self, request: RoutedRequest) -> dict[str, Any]:
        """An engine comes or goes by hand; the answer comes when it has."""
        control, name = self._control, request.path.removeprefix(_ENGINES).removeprefix("/")
        now_s = asyncio.get_running_loop().time()
        try:
            if request.method == "GET" and not name:
                engines = [_told(each, now_s) for each in self._router.engines]
                return {
                    "epoch": self._router.epoch,
                    "engines": engines,
                    "dropped": list(self._router.dropped),
                }
            if request.method == "POST" and not name:
                wanted = msgspec.json.decode(request.body or b"{}", type=_NewEngine)
                return _told(await control.add(wanted.url), now_s)
            if request.method == "DELETE":
                engine = next((each for each in control.staying if each.name == name), None)
                if engine is None:
                    raise ApiError(404, f"There is no engine {name} that stays.")
                await control.retire(engine)
                return {"name": name, "url": engine.pool.url, "up": False}
        except (SettingsError, msgspec.DecodeError) as error:
            raise ApiError(400, str(error)) from None
        except EngineError as error:
            raise ApiError(503, str(error)) from None
        raise ApiError(405, "GET and POST /admin/engines, DELETE /admin/engines/NAME.")

    async def _ask_all(self, request: RoutedRequest, client: Client) -> str:
        """Every engine does it, or the caller hears which has not."""
        status, headers, body = 200, [_JSON], b""
        for engine in self._router.engines:
            try:
                async with asyncio.timeout(self._router.config.answer_timeout_s):
                    attempt = await engine.pool.send(request.encoded(None))
                    try:
                        head = await attempt.head
                        told = await attempt.whole(MOST_WHOLE_BYTES)
                    finally:
                        attempt.close()
            except (OSError, TimeoutError) as error:
                if engine not in self._router.engines:  # it has left meanwhile
                    continue
                raise ApiError(503, f"{engine.pool.url} has not done it: {error}") from None
            if head.status != 200:
                status, headers, body = head.status, [_JSON], told
                break
            body = told
        await client.whole(status, headers, body)
        return "completed" if status == 200 else "refused"


def _told(engine: RoutedEngine, now_s: float) -> dict[str, Any]:
    tracker = engine.tracker
    return {
        "name": engine.name,
        "url": engine.pool.url,
        "up": engine.takes_requests(now_s),
        "leaving": engine.is_leaving,
        "reason": engine.reason,
        "pending": tracker.num_pending,
        "running": tracker.num_running,
        **{name: getattr(engine.state, name) for name in ("kv_usage", "hit_rate", "busy", "mbu")},
        "max_seqs": engine.state.max_seqs,
        "kv_tokens": engine.state.kv_tokens,
        "price": engine.state.linear,
        "curve": engine.state.curve,
    }


class Asking(Client):
    """Nobody: keeps the answer to a question of the router's own."""

    def __init__(self) -> None:
        self.has_begun = False
        self.status, self.headers, self.body = 503, [_JSON], b""

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
