"""Servers that join routers by themselves."""

import asyncio
import json
import signal
import time

import pytest
from tests.fleet.conftest import RouteProcess, key_file  # noqa: F401
from tests.fleet.test_forwarding import KEY, answer, routed
from tests.reliability.process import ServeProcess

from ridgeline.core.errors import NetworkError, SettingsError
from ridgeline.server.config import ServerConfig
from ridgeline.server.continuation import ROUTER_KEY, router_token
from ridgeline.server.membership import Membership, own_url
from ridgeline.weights import locate_model

ENGINE = "http://127.0.0.1:9"
TOKEN = router_token(KEY)
SHOWN = {ROUTER_KEY.decode(): TOKEN.decode()}


def member_of(router, port=9, **settings):
    return Membership(router, ServerConfig(**settings), port, TOKEN)


def urls(client):
    return [each["url"] for each in client.get("/fleet/state").json()["engines"]]


def test_a_server_joins_once_a_start_of_the_router_and_leaves_as_it_ends(tmp_path):
    with routed(tmp_path, [answer(200)]) as (client, _):
        router = str(client.base_url)
        member = member_of(router)
        assert ENGINE in asyncio.run(member.join())
        assert urls(client)[1:] == [ENGINE]
        assert asyncio.run(member.join()) is None
        assert client.delete("/admin/engines/1", headers=SHOWN).status_code == 200
        assert asyncio.run(member.join()) is None  # whom somebody has drained stays away
        assert urls(client)[1:] == []
        again = member_of(router)
        asyncio.run(again.join())
        assert asyncio.run(member_of(router).join())  # it is there, as it says
        assert urls(client)[1:] == [ENGINE]
        asyncio.run(again.leave())
        assert urls(client)[1:] == []


def test_a_router_that_is_not_there_is_said_once_and_asked_again(monkeypatch):
    monkeypatch.setattr("ridgeline.server.membership._EVERY_S", 0.01)
    said = []

    async def watch():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await member_of("http://127.0.0.1:9").keep(said.append)

    asyncio.run(watch())
    (line,) = said
    assert line.startswith("The router http://127.0.0.1:9 is not joined: ")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:8123"),
        ({"host": "0.0.0.0", "api_key": ["a"]}, "http://127.0.0.1:8123"),  # of a router on it
        ({"host": "::1"}, "http://[::1]:8123"),
        ({"join": ["127.0.0.1:1"], "join_as": "a:1/", "router_key_file": "k"}, "http://a:1"),
    ],
)
def test_a_server_is_found_at_the_address_that_reaches_the_router(settings, found):
    config = ServerConfig(**settings)
    assert asyncio.run(own_url(config, 8123, "http://127.0.0.1:8000")) == found


def test_a_router_whose_name_is_not_known_is_not_joined_yet():
    config = ServerConfig(host="0.0.0.0", api_key=("a",))
    with pytest.raises(OSError, match=r"[Nn]ame"):
        asyncio.run(own_url(config, 8123, "http://no-such-name.invalid:8000"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"join": ["http://r:1/v1"]}, "in join: "),
        ({"join": ["ftp://r:1"]}, "in join: "),
        ({"join": ["http://127.0.0.1:1"], "join_as": "http://a:b"}, "for join_as: "),
        ({"join": ["http://r:1"]}, "host 127.0.0.1 .* join_as"),
    ],
)
def test_addresses_that_cannot_be_are_named_before_anything_is_loaded(settings, said):
    with pytest.raises(SettingsError, match=said):
        ServerConfig(router_key_file="k", **settings)


def test_an_engine_that_a_router_has_lost_is_dropped_and_joins_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.fleet.router._LOST_S", 0.2)
    with routed(tmp_path, [answer(200)], probe_s=0.02) as (client, _):
        member = member_of(str(client.base_url))
        for _ in range(2):
            assert ENGINE in asyncio.run(member.join())
            assert urls(client)[1:] == [ENGINE]
            deadline_s = time.monotonic() + 20
            while urls(client)[1:]:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)


def test_an_engine_that_starts_again_while_it_leaves_joins_once_it_has_left(monkeypatch):
    async def main():
        member, leaving, posted = member_of("http://127.0.0.1:1"), [True], []

        async def get(path):
            engine = {"name": "1", "url": ENGINE, "leaving": True}
            return json.dumps({"epoch": "e", "engines": [engine] * len(leaving), "dropped": []})

        async def post(path, body):
            posted.append(body)

        member._target.get, member._target.post = get, post
        with pytest.raises(NetworkError, match="still leaving"):
            await member.join()
        leaving.clear()
        assert await member.join()
        assert posted == [{"url": ENGINE}]

    asyncio.run(main())


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
