"""Engines that come and go while they are used: nothing is lost, hung or changed."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import httpx
import pytest
from tests.fleet.conftest import stream
from tests.fleet.reading import read, without_identity
from tests.fleet.test_router import CASES, PATH, body_of
from tests.reliability.process import ServeProcess

from ridgeline.core.errors import SettingsError
from ridgeline.fleet import serving
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.replicas import OwnReplicas
from ridgeline.fleet.router import Router
from ridgeline.server.serving import open_listener
from ridgeline.weights import locate_model


class RouterThread:
    """A router on an event loop of its own; `call` runs something there."""

    def __init__(self, config):
        self.router, self._ready, self.lines = Router(config), threading.Event(), []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(config)))
        self._thread.start()
        assert self._ready.wait(30)

    async def _main(self, config):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with closing(open_listener(config)) as listener:
            await serving.run(
                self.router, listener, self.lines.append, self._listens, stopping=self._stop
            )

    def _listens(self, url):
        self.url = url
        self._ready.set()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@contextmanager
def engines_of(folder, key_file, count):
    """Real engines."""
    started = [
        ServeProcess(
            locate_model(None), folder / f"engine-{number}",
            "--router-key-file", str(key_file), "--no-log-requests",
        )
        for number in range(count)
    ]  # fmt: skip
    try:
        for server in started:
            server.wait_ready()
        yield started
    finally:
        for server in started:
            server.close()


@contextmanager
def routed(engines, key_file):
    urls = tuple(each.url for each in engines)
    config = RouterConfig(engine=urls, port=0, router_key_file=str(key_file), policy="round-robin")
    thread = RouterThread(config)
    try:
        yield thread
    finally:
        thread.close()


def test_engines_come_and_go_under_load_and_nothing_is_lost(tmp_path, key_file):
    """One is drained; of another the streams that it has go on elsewhere at once."""
    with (
        engines_of(tmp_path, key_file, 4) as engines,
        routed(engines[:2], key_file) as thread,
        httpx.Client(base_url=thread.url, timeout=60) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        router, is_over = thread.router, threading.Event()
        expected = {
            name: without_identity(read(stream(client, PATH, body_of(name)))) for name in CASES
        }

        def ask(name):
            found = []
            while not is_over.is_set():
                found.append(without_identity(read(stream(client, PATH, body_of(name)))))
            return name, found

        running = [threads.submit(ask, name) for name in CASES]
        try:
            for (leaving, coming), drain_s in zip(pairwise(engines[1:]), (30.0, 0.0), strict=True):
                engine = router.engines[1]
                assert thread.call(router.add_engine(coming.url)).is_up
                while not (drain_s or engine.attempts):  # some to be moved
                    time.sleep(0.001)
                thread.call(router.retire(engine, drain_s=drain_s))
                assert not engine.attempts
                leaving.close()  # SIGKILL
        finally:
            is_over.set()
        answers = [each.result() for each in running]
        names = [each.name for each in router.engines]
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success
    for name, found in answers:
        assert all(each == expected[name] for each in found), name
    assert names == ["0", "3"]  # a name is of one engine for ever


def test_a_router_says_that_it_is_ready_once_an_engine_takes_requests():
    class Engine(BaseHTTPRequestHandler):
        status = 503

        def do_GET(self):
            self.send_response(self.status if self.path == "/health" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        thread = RouterThread(RouterConfig(engine=(url,), port=0, probe_s=0.05))
        try:
            time.sleep(0.2)
            assert "Ready." not in thread.lines
            Engine.status = 200
            deadline_s = time.monotonic() + 20
            while "Ready." not in thread.lines:
                assert time.monotonic() < deadline_s, thread.lines
                time.sleep(0.01)
            time.sleep(0.2)
            assert thread.lines.count("Ready.") == 1
        finally:
            thread.close()
            server.shutdown()


def test_the_engine_that_keeps_files_stays_and_none_is_there_twice(tmp_path):
    url = "http://127.0.0.1:9"
    router = Router(RouterConfig(engine=(url,)))
    with pytest.raises(SettingsError, match="keeps files"):
        asyncio.run(router.retire(router.engines[0]))
    with pytest.raises(SettingsError, match="there twice"):
        asyncio.run(router.add_engine(url + "/"))
    with pytest.raises(SettingsError, match="there twice"):
        Router(RouterConfig(engine=(url, url)))


class MovingReplica:
    """A replica that runs on at another address whenever it is told to."""

    def __init__(self):
        self.url, self.is_ended, self._number = "", False, 0

    async def start(self):
        self._number += 1
        self.url = f"http://127.0.0.1:{self._number}"
        return self.url

    def keep(self, moved):
        self._moved = moved

    async def move(self, number=None):
        before, _ = self.url, await self.start()
        if number is not None:
            self.url = f"http://127.0.0.1:{number}"
        await self._moved(before, self.url)

    async def end(self):
        self.is_ended = True


def test_a_replica_that_moves_while_it_leaves_is_ended_where_it_is():
    async def main():
        first, moving = MovingReplica(), MovingReplica()
        first._number = 100
        replicas = OwnReplicas([first, moving])
        urls = [await replicas.start() for _ in range(2)]
        router = replicas.router = Router(RouterConfig(engine=tuple(urls)))
        await moving.move()  # it stays: the router goes along
        assert [each.pool.url for each in router.engines] == [first.url, moving.url]
        leaving = router.engines[1]
        leaving.leave()
        await moving.move()
        assert leaving in router.engines  # and no other has come
        await router.retire(leaving, drain_s=0.0)
        await replicas.end(leaving.pool.url)
        assert (first.is_ended, moving.is_ended) == (False, True)
        assert await replicas.start()  # its place is free
        await router.close()

    asyncio.run(main())


def test_a_replica_is_ended_where_another_was_before_it_moved():
    async def main():
        replicas = OwnReplicas([MovingReplica(), (other := MovingReplica())])
        other._number = 100
        first_url, _ = [await replicas.start() for _ in range(2)]
        await replicas._all[0].move()
        await other.move(number=1)
        assert other.url == first_url
        await replicas.end(other.url)
        assert [each.is_ended for each in replicas._all] == [False, True]

    asyncio.run(main())
