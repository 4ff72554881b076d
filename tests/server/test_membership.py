"""Servers that join routers by themselves."""

import asyncio
import signal

import pytest
from tests.fleet.conftest import RouteProcess, key_file  # noqa: F401
from tests.fleet.test_forwarding import KEY, answer, routed
from tests.reliability.process import ServeProcess

from ridgeline.server.config import ServerConfig
from ridgeline.server.continuation import ROUTER_KEY, router_token
from ridgeline.server.membership import Membership, own_url
from ridgeline.weights import locate_model

ENGINE = "http://127.0.0.1:9"
TOKEN = router_token(KEY)


def urls(client):
    return [each["url"] for each in client.get("/fleet/state").json()["engines"]]


def test_a_server_joins_once_a_start_of_the_router_and_leaves_as_it_ends(tmp_path):
    with routed(tmp_path, [answer(200)]) as (client, _):
        router = str(client.base_url)
        member = Membership(router, ENGINE, TOKEN)
        assert ENGINE in asyncio.run(member.join())
        assert urls(client)[1:] == [ENGINE]
        assert asyncio.run(member.join()) is None
        shown = {ROUTER_KEY.decode(): TOKEN.decode()}
        assert client.delete("/admin/engines/1", headers=shown).status_code == 200
        assert asyncio.run(member.join()) is None  # whom somebody has drained stays away
        assert urls(client)[1:] == []
        again = Membership(router, ENGINE, TOKEN)
        asyncio.run(again.join())
        assert asyncio.run(Membership(router, ENGINE, TOKEN).join())  # it is there, as it says
        assert urls(client)[1:] == [ENGINE]
        asyncio.run(again.leave())
        assert urls(client)[1:] == []


def test_a_router_that_is_not_there_is_said_once_and_asked_again(monkeypatch):
    monkeypatch.setattr("ridgeline.server.membership._EVERY_S", 0.01)
    said = []

    async def watch():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await Membership("http://127.0.0.1:9", ENGINE, TOKEN).keep(said.append)

    asyncio.run(watch())
    (line,) = said
    assert line.startswith("The router http://127.0.0.1:9 is not joined: ")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:8123"),
        ({"host": "0.0.0.0", "api_key": ["a"]}, "http://127.0.0.1:8123"),  # of a router on it
        ({"host": "::1"}, "http://[::1]:8123"),
    ],
)
def test_a_server_is_found_at_the_address_that_reaches_the_router(settings, found):
    assert own_url(ServerConfig(**settings), 8123, "http://127.0.0.1:8000") == found


def test_a_server_takes_requests_of_the_router_that_it_has_joined(tmp_path, key_file):  # noqa: F811
    keys = ("--router-key-file", str(key_file))
    model, servers = locate_model(None), []
    servers.append(ServeProcess(model, tmp_path / "first", *keys))
    router = RouteProcess(tmp_path / "router.log", "--engine", servers[0].url, *keys)
    try:
        servers.append(ServeProcess(model, tmp_path / "second", *keys, "--join", router.url))
        router.wait_ready(2)
        with router.client() as client:
            assert urls(client) == [each.url for each in servers]
            servers[1].process.send_signal(signal.SIGTERM)
            assert servers[1].process.wait(120) == 0
            assert urls(client) == [servers[0].url]
    finally:
        router.close()
        for each in servers:
            each.close()
