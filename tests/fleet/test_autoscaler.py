"""Engines that are started and ended as the load asks for, and by hand."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from tests.fleet.reading import read, without_identity
from tests.fleet.test_engines import STATE
from tests.fleet.test_router import PATH, body_of, wait_up
from tests.reliability.process import free_port

from ridgeline.cli.main import main
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.fleet import autoscaler, engines
from ridgeline.fleet import router as router_module
from ridgeline.fleet.app import RouterApp
from ridgeline.fleet.autoscaler import Autoscaler
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.control import FleetControl
from ridgeline.fleet.forwarding import ForwardedTimes
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.router import Router

CURVE = {"tokens": [1, 256, 2048], "seconds": [0.02, 0.03, 0.2], "context_s": 1e-8}
TOLD = json.dumps(STATE | {"curve": CURVE, "max_seqs": 64, "kv_tokens": 1 << 20}).encode()
PROMPT = json.dumps({"prompt": "x" * 3600, "max_tokens": 60}).encode()
KINDS = ("sampled", "grammar")
HEADERS = {"authorization": "Bearer admin"}


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose time may be moved on."""

    skipped_s = 0.0

    def time(self):
        return super().time() + self.skipped_s


class ScriptedReplicas:
    """Engines that say how they are, and no more."""

    def __init__(self, fails=0):
        self.running, self._fails = {}, fails
        self.status, self.body = 200, TOLD

    async def start(self):
        if self._fails:
            self._fails -= 1
            raise EngineError("No memory is left.")
        server = await asyncio.start_server(self._tell, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.running[url] = server
        return url

    async def end(self, url):
        self.running.pop(url).close()

    async def _tell(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                status, body = (200, TOLD) if head.startswith(b"GET") else (self.status, self.body)
                if not head.startswith(b"GET"):
                    await reader.readexactly(len(PROMPT))
                fields = b"HTTP/1.1 %d X\r\ncontent-length: %d" % (status, len(body))
                writer.write(fields + b"\r\n\r\n" + body)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()


@pytest.fixture
def scaled(key_file, monkeypatch):
    """Runs a test in a loop, with an autoscaler of a fleet that has one scripted engine."""

    said = list[str]()
    monkeypatch.setattr(engines, "_PROBE_TIMEOUT_S", 1e6)  # of skipped time
    monkeypatch.setattr(router_module, "_LOST_S", 1e6)

    def run(test, *, is_told_only=False, fails=0):
        async def within():
            replicas = ScriptedReplicas()
            first = await replicas.start()
            replicas._fails = fails
            config = RouterConfig(
                engine=(first,), router_key_file=str(key_file),
                slo="ttft=0.5,tpot=0.05", max_replicas=4, start_s=10.0,
            )  # fmt: skip
            router = Router(config)
            await router.start()
            used = None if is_told_only else replicas
            control = FleetControl(router, used, start_s=config.start_s)
            try:
                scaler = Autoscaler(control, config.scaling_goal, say=said.append)
                await test(scaler, control, replicas)
            finally:
                await control.close()
                await router.close()
                for server in replicas.running.values():
                    server.close()

        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(within())
        return said

    return run


async def pass_time(scaler, control, *, seconds, rate):
    """Requests come so many a second; a decision is made every five seconds."""
    loop = asyncio.get_running_loop()
    for _ in range(seconds // 5):
        for _ in range(5 * rate):
            path = "/v1/completions"
            scaler.note_arrival(
                RoutedRequest(method="POST", path=path, target=b"", headers=[], body=PROMPT)
            )
            loop.skipped_s += 1 / rate
            times = ForwardedTimes(first_s=loop.time(), output_tokens=60)
            scaler.note_answer(loop.time(), times, is_whole=True)
        loop.skipped_s += 0 if rate else 5
        await scaler.decide()
        await control.settled()


def test_engines_are_started_and_ended_as_the_load_asks_and_what_came_is_told(scaled):
    async def test(scaler, control, replicas):
        await pass_time(scaler, control, seconds=10, rate=1)
        assert scaler.told()["wanted"] == len(replicas.running) == 1
        await pass_time(scaler, control, seconds=20, rate=20)
        up = scaler.told()
        assert up["wanted"] == len(replicas.running) == len(control.staying) > 1
        grown = up["decisions"][-1]
        assert (grown["present"], grown["came"]) == (1, None)
        assert grown["predicted"]["within_limits"] > 0.9
        await pass_time(scaler, control, seconds=40, rate=20)
        came = scaler.told()["decisions"][-1]["came"]
        assert came["within_limits"] == 1
        assert came["requests_per_s"] == pytest.approx(20, rel=0.2)
        gauges = {family.name: family.samples[0].value for family in scaler.collect()}
        assert gauges["ridgeline_router_replicas"] == len(replicas.running)
        assert gauges["ridgeline_router_expected_requests_per_second"] == pytest.approx(20, rel=0.1)
        await pass_time(scaler, control, seconds=100, rate=0)
        assert scaler.told()["wanted"] == len(replicas.running) == len(control.staying) == 1

    said = scaled(test)
    assert said[0].startswith("From 1 engines to ")
    assert any("were to keep the limits: 100% did, of " in line for line in said)


def test_a_decision_that_fails_is_not_the_last(scaled, monkeypatch, caplog):
    monkeypatch.setattr(autoscaler, "INTERVAL_S", 0.001)

    async def test(scaler, control, replicas):
        asked = asyncio.Event()

        async def decide():
            if caplog.records:
                asked.set()
            raise ZeroDivisionError

        scaler.decide = decide
        running = asyncio.create_task(scaler.run())
        await asyncio.wait_for(asked.wait(), 10)
        running.cancel()

    scaled(test)
    assert "could not be decided" in caplog.text


def test_a_replica_that_starts_is_counted_once(scaled):
    async def test(scaler, control, replicas):
        started, may_answer = replicas.start, asyncio.Event()

        async def start():
            url = await started()
            await may_answer.wait()
            return url

        replicas.start = start
        counts = []
        adding = asyncio.create_task(control.add())
        while not adding.done():
            counts.append(len(scaler._loads(asyncio.get_running_loop().time())))
            may_answer.set() if len(counts) > 3 else None
            await asyncio.sleep(0)
        assert set(counts[1:]) == {2}

    scaled(test)


def test_an_engine_that_comes_by_hand_while_it_is_decided_is_one_of_those_that_are_wanted(scaled):
    async def test(scaler, control, replicas):
        decide = scaler.decide

        async def decide_meanwhile():
            await asyncio.gather(decide(), control.add())

        scaler.decide = decide_meanwhile
        await pass_time(scaler, control, seconds=5, rate=20)
        assert len(replicas.running) == len(control.staying) == scaler.wanted > 1

    scaled(test)


def test_engines_that_joined_serve_and_are_neither_ended_nor_waited_for(scaled):
    async def test(scaler, control, replicas):
        joined = ScriptedReplicas()
        others = [await control.add(await joined.start()) for _ in range(2)]
        down = await control.add("http://127.0.0.1:9")
        assert not down.is_up
        now_s = asyncio.get_running_loop().time()
        assert len(scaler._loads(now_s)) == 3
        await pass_time(scaler, control, seconds=5, rate=1)
        assert (scaler.wanted, len(replicas.running)) == (1, 1)
        await pass_time(scaler, control, seconds=20, rate=80)
        assert scaler.wanted == len(replicas.running) == len(control.owned) > 1
        await pass_time(scaler, control, seconds=100, rate=0)
        assert scaler.wanted == len(replicas.running) == 1
        assert all(each in control.staying for each in others)
        for server in joined.running.values():
            server.close()

    scaled(test)


def test_a_replica_that_does_not_start_is_tried_again(scaled, caplog):
    async def test(scaler, control, replicas):
        await pass_time(scaler, control, seconds=20, rate=20)
        assert control.num_lost_starts == 3
        assert scaler.told()["wanted"] == len(replicas.running) > 1

    scaled(test, fails=3)
    assert "No memory is left." in caplog.text


@pytest.mark.parametrize(
    ("status", "body", "is_load", "share"),
    [
        (200, b'{"usage":{"completion_tokens":60}}', True, 1),
        (401, b"no key", False, None),
        (400, b"mistaken", False, None),
        (429, b'{"error":{"code":"rate_limit_exceeded"}}', False, None),
        (429, b'{"error":{"code":"server_overloaded"}}', True, 0),
    ],
)
def test_who_is_let_in_by_no_engine_starts_none_and_who_finds_no_room_is_counted(
    scaled, status, body, is_load, share
):
    async def test(scaler, control, replicas):
        replicas.status, replicas.body = status, body
        app = RouterApp(control, scaler)

        async def whole(scope, receive, send):  # nothing goes past it to a transport
            await app(
                {**scope, "extensions": {"ridgeline.connection": (None, None)}}, receive, send
            )

        transport = httpx.ASGITransport(whole)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            for _ in range(20):
                found = await client.post("/v1/completions", content=PROMPT)
                assert (found.status_code, found.content) == (status, body)
        asyncio.get_running_loop().skipped_s += 5
        await scaler.decide()
        told = scaler.told()
        assert told["expected"]["requests_per_s"] == (4 if is_load else 0)
        assert told["within_limits_1m"] == share

    scaled(test)


def test_a_router_that_starts_nothing_says_how_many_are_wanted(scaled):
    """And while those are awaited, it does not want more for it."""

    async def test(scaler, control, replicas):
        await pass_time(scaler, control, seconds=20, rate=20)
        wanted = scaler.told()["wanted"]
        assert wanted > 1
        assert len(replicas.running) == 1
        decisions = len(scaler.told()["decisions"])
        await pass_time(scaler, control, seconds=5, rate=20)
        assert (scaler.told()["wanted"], len(scaler.told()["decisions"])) == (wanted, decisions)
        with pytest.raises(SettingsError, match="give the URL"):
            await control.add()

    scaled(test, is_told_only=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-replicas", "2"), "--max-replicas needs --slo"),
        (("--min-replicas", "2"), "--min-replicas needs --max-replicas"),
        (("--replicas", "2", "--max-replicas", "2", "--slo", "chat"), "a number that stays"),
        (("--min-replicas", "3", "--max-replicas", "2"), "must not exceed"),
    ],
)
def test_numbers_of_replicas_that_mean_nothing_are_refused(options, said, capsys):
    assert main(["serve", *options]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


@contextmanager
def served(folder, *options):
    """A server of one to three replicas whose limits nothing keeps: only hands change it."""
    port = free_port()
    command = [
        sys.executable, "-m", "ridgeline", "serve", "--port", str(port), "--max-replicas", "3",
        "--slo", "ttft=1e-9", "--policy", "round-robin", "--data-dir", str(folder / "data"),
        "--no-log-requests", *options,
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_up(url, 1)
        yield url
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()


def come_and_go(folder, rounds):
    """Two replicas come and go so many times under load; returns the names of engines that served,
    and how many streams went on elsewhere."""
    keys = ("--api-key", "secret", "--admin-api-key", "admin", "--drain-s", "0.2")
    with (
        served(folder, *keys) as url,
        httpx.Client(base_url=url, timeout=600, headers=HEADERS) as client,
        ThreadPoolExecutor(len(KINDS) + 2) as threads,
    ):
        assert client.post("/admin/engines", headers={"authorization": "Bearer secret"}).is_error
        expected, seen, is_over = {}, set(), threading.Event()

        def ask(name):
            body = {**body_of(name), "stream": True}
            with client.stream("POST", PATH, json=body) as response:
                seen.add(response.headers["x-ridgeline-engine"])
                return without_identity(read(b"".join(response.iter_raw())))

        def keep_asking(name):
            count = 0
            while not is_over.is_set():
                assert ask(name) == expected[name], name
                count += 1
            return count

        for name in KINDS:
            expected[name] = ask(name)
        asking = [threads.submit(keep_asking, name) for name in KINDS]
        try:
            for _ in range(rounds):
                coming = [threads.submit(client.post, "/admin/engines") for _ in range(2)]
                names = [each.result().raise_for_status().json()["name"] for each in coming]
                deadline_s = time.monotonic() + 300
                while not seen.issuperset(names):  # they have streams
                    assert time.monotonic() < deadline_s, client.get("/fleet/state").text
                    time.sleep(0.01)
                going = [threads.submit(client.delete, f"/admin/engines/{n}") for n in names]
                assert all(each.result().status_code == 200 for each in going)
        finally:
            is_over.set()
        assert min(each.result() for each in asking) > 0
        assert client.delete("/admin/engines/0").status_code == 400
        assert client.delete("/admin/engines/7000").status_code == 404
        state = client.get("/fleet/state").json()
        assert [each["name"] for each in state["engines"]] == ["0"]
        metrics = client.get("/metrics").text
    moved = metrics.partition("\nridgeline_router_continuations_total ")[2].split()[0]
    return seen, float(moved)


def test_two_replicas_come_and_go_by_hand_and_nothing_is_lost(tmp_path):
    seen, _ = come_and_go(tmp_path, 1)
    assert len(seen) == 3


@pytest.mark.slow
def test_two_hundred_replicas_come_and_go_and_nothing_is_lost(tmp_path, counted):
    seen, moved = come_and_go(tmp_path, 100)
    counted(200)
    print(f"{len(seen)} engines served, {moved:.0f} streams went on elsewhere")
    assert len(seen) == 201
    assert moved > 0
