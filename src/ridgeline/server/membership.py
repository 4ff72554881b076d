"""A server that joins routers by itself, and leaves them as it ends."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable

import msgspec

from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.core.errors import NetworkError
from ridgeline.server.config import ServerConfig, base_url
from ridgeline.server.continuation import ROUTER_KEY

_EVERY_S = 2.0
_ANSWER_S = 10.0
_LEAVE_S = 5.0  # once nothing is in progress any more
_ENGINES = "/admin/engines"
_FAILURES = (NetworkError, OSError, msgspec.DecodeError)


class _Engine(msgspec.Struct):
    name: str
    url: str
    leaving: bool


class _Engines(msgspec.Struct):
    epoch: str
    engines: list[_Engine]
    dropped: list[str]


class Membership:
    """Of the engine on ``port`` among those of a router, which has the key of ``token``.

    It asks to be one of them once for each process of the router, which its ``epoch`` tells, and
    when the router has dropped it as lost: whom somebody has drained stays away.
    """

    def __init__(self, router: str, config: ServerConfig, port: int, token: bytes) -> None:
        self._target = HttpTarget(router, model="", headers={ROUTER_KEY.decode(): token.decode()})
        self._router, self._config, self._port = router, config, port
        self._epoch = self._url = ""

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
        """Join it if it has begun anew, or lost this engine; returns what is to be said of that.

        Raises:
            NetworkError: it does not answer, or refuses, or an engine at this URL still leaves it.
            OSError: its name is not known, or no address of this machine reaches it.
            msgspec.DecodeError: it is no router.
        """
        told = await self._engines()
        if told.epoch == self._epoch and self._url not in told.dropped:
            return None
        url = await own_url(self._config, self._port, self._router)
        known = [each for each in told.engines if each.url == url]
        if any(each.leaving for each in known):
            raise NetworkError(f"{url} is still leaving it.")
        if not known:
            await self._target.post(_ENGINES, {"url": url})
        self._epoch, self._url = told.epoch, url
        return f"The router {self._router} has this engine as {url}."

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
            Membership(router, config, port, token) for router in config.join if token is not None
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


async def own_url(config: ServerConfig, port: int, router: str) -> str:
    """Where a router finds a server: ``join_as``, or at the address that reaches the router.

    Raises:
        OSError: the router's name is not known, or no address reaches it.
    """
    if config.join_as is not None:
        return config.join_as
    host, scheme = config.host, "http" if config.ssl_certfile is None else "https"
    if host in ("0.0.0.0", "::"):
        _, name, its_port = base_url(router, "the address of a router")
        family, _, _, _, address = (
            await asyncio.get_running_loop().getaddrinfo(name, its_port, type=socket.SOCK_DGRAM)
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # which sends nothing
            host = probe.getsockname()[0]
    with contextlib.suppress(ValueError):
        host = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    return f"{scheme}://{host}:{port}"
