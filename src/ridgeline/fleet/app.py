"""The router's ASGI application: its own few routes, and the engines' behind them."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from ridgeline.fleet.forwarding import MOST_WHOLE_BYTES, Client, Forwarding
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.router import Router
from ridgeline.server.body import ClientDisconnectedError, declared_length, read_body
from ridgeline.server.errors import ApiError, family_of
from ridgeline.server.ids import new_id
from ridgeline.server.replies import encode

_JSON = (b"content-type", b"application/json")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_ASKED_WITH = "/load"  # any key that an engine takes may read it


class RouterApp:
    """Answers ``/health``, ``/ready`` and ``/metrics`` itself; the rest is the engines'."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, outcome = Client(scope, send), "refused"
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
            return await self._metrics(request, client, receive)
        if path.startswith("/admin/") and not request.is_for_all:
            raise ApiError(501, "This is for a single engine: ask it itself.")
        if path.startswith("/fleet/"):
            raise ApiError(404, "There is no such route.")
        if request.is_for_all:
            return await self._ask_all(request, client)
        return await self._forward(Forwarding(router, request, client), receive)

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

    async def _metrics(self, request: RoutedRequest, client: Client, receive: Receive) -> str:
        """For those whose key an engine takes: the router knows no keys."""
        asking = Asking()
        asked = RoutedRequest(
            method="GET",
            path=_ASKED_WITH,
            target=_ASKED_WITH.encode(),
            headers=request.headers,
            body=b"",
        )
        await self._forward(Forwarding(self._router, asked, asking), receive)
        if asking.status != 200:
            await client.whole(asking.status, asking.headers, asking.body)
            return "refused"
        await client.whole(200, [_TEXT], self._router.exposition())
        return "own"

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
