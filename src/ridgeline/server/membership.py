"""A server that joins routers by itself, and leaves them as it ends."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.core.errors import NetworkError
from ridgeline.server.config import ServerConfig
from ridgeline.server.continuation import ROUTER_KEY

_EVERY_S = 2.0
_ANSWER_S = 10.0
_LEAVE_S = 5.0  # once nothing is in progress any more
_ENGINES = "/admin/engines"
_FAILURES = (NetworkError, TimeoutError, msgspec.DecodeError)


class _Engine(msgspec.Struct):
    name: str
    url: str


class _Engines(msgspec.Struct):
    epoch: str
    engines: list[_Engine]


class Membership:
    """Of the engine at ``url`` among those of a router, which has the key of ``token``.

    It asks to be one of them once for each process of the router, which its ``epoch`` tells: whom
    somebody has drained stays away.
    """

    def __init__(self, router: str, url: str, token: bytes) -> None:
        self._target = HttpTarget(router, model="", headers={ROUTER_KEY.decode(): token.decode()})
        self._router, self._url = router, url
        self._epoch = ""

    async def keep(self, announce: Callable[[str], object]) -> None:
        """Join it again whenever it has begun anew; what changes is said."""
        said = ""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    line = await self.join()
            except _FAILURES as error:
                line = f"The router {self._router} is not joined: {error or 'no answer'}"
            if line is not None and line != said:
                announce(line)
                said = line
            await asyncio.sleep(_EVERY_S)

    async def join(self) -> str | None:
        """Join it if it has begun anew; returns what is to be said of that.

        Raises:
            NetworkError: it does not answer, or refuses.
            msgspec.DecodeError: it is no router.
        """
        told = await self._engines()
        if told.epoch == self._epoch:
            return None
        if all(each.url != self._url for each in told.engines):
            await self._target.post(_ENGINES, {"url": self._url})
        self._epoch = told.epoch
        return f"The router {self._router} has this engine as {self._url}."

    async def leave(self) -> None:
        """Have it send no more, and wait until what it has sent has ended."""
        with contextlib.suppress(*_FAILURES):
            for each in (await self._engines()).engines:
                if each.url == self._url:
                    await self._target.delete(f"{_ENGINES}/{each.name}")

    async def _engines(self) -> _Engines:
        return msgspec.json.decode(await self._target.get(_ENGINES), type=_Engines)


class Memberships:
    """Of a server that listens on ``port`` in each router of its settings, from now on."""

    def __init__(
        self, config: ServerConfig, port: int, token: bytes | None, say: Callable[[str], object]
    ) -> None:
        self._each = [
            Membership(router, config.join_as or own_url(config, port, router), token)
            for router in config.join
            if token is not None
        ]
        self._joining = [asyncio.create_task(each.keep(say)) for each in self._each]
        self._leaving: asyncio.Future[list[None]] | None = None

    def leave(self) -> None:
        """Begin to leave them."""
        for task in self._joining:
            task.cancel()
        self._leaving = asyncio.gather(*(each.leave() for each in self._each))

    async def left(self) -> None:
        """Until all know, or have had some seconds to."""
        assert self._leaving is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving, _LEAVE_S)


def own_url(config: ServerConfig, port: int, router: str) -> str:
    """Where a router finds a server: at the address that reaches the router, if any will do."""
    host, scheme = config.host, "http" if config.ssl_certfile is None else "https"
    if host in ("0.0.0.0", "::"):
        parts = urlsplit(router if "://" in router else f"http://{router}")
        with contextlib.suppress(OSError, ValueError):
            family, _, _, _, address = socket.getaddrinfo(
                parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # which sends nothing
                host = probe.getsockname()[0]
    with contextlib.suppress(ValueError):
        host = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    return f"{scheme}://{host}:{port}"
