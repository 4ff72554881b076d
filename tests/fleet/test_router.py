"""``ridgeline route`` before real ``ridgeline serve`` processes on the embedded model."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import psutil
from tests.fleet.conftest import fleet_of, stream
from tests.fleet.reading import read, without_identity
from tests.reliability.process import free_port

from ridgeline.weights import locate_model

CHAT = {"messages": [{"role": "user", "content": "Write the numbers up to a hundred."}]}
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 12}},
    "required": ["names"],
    "additionalProperties": False,
}
ANSWER = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.2}
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.1, "seed": 5, "n": 2, "logprobs": True},
    "penalties": {"temperature": 0.8, "seed": 6} | PENALTIES,
    "grammar": {"temperature": 1.0, "seed": 7, "response_format": ANSWER},
}
PATH = "/v1/chat/completions"
HEADERS = {"authorization": "Bearer secret"}
NUM_TOKENS = 64


def body_of(name):
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": name != "grammar"}
    return CHAT | CASES[name] | fields


def test_streams_outlive_their_engine(tmp_path, key_file):
    """Also what else a router does: keys pass through it, and when no engine is left it says so."""
    keys = ("--api-key", "secret", "--admin-api-key", "admin")
    with (
        fleet_of(locate_model(None), tmp_path, key_file, serve=keys) as fleet,
        fleet.router.client(headers=HEADERS) as client,
    ):
        expected = {
            name: without_identity(read(stream(client, PATH, body_of(name)))) for name in CASES
        }
        assert httpx.post(f"{fleet.router.url}{PATH}", json=CHAT).status_code == 401
        assert httpx.get(f"{fleet.router.url}/metrics").status_code == 401
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.post("/tokenize", json={"prompt": "sea"}).json()["tokens"]
        forgotten = client.delete("/admin/tenants/a", headers={"authorization": "Bearer admin"})
        assert forgotten.json()["deleted"]
        whole = client.post(PATH, json=body_of("greedy")).json()
        text = expected["greedy"]["choices"][0]["delta"]["content"]
        assert whole["choices"][0]["message"]["content"] == text

        engines, is_killed = [], Event()

        def cut(number, engine):
            if number == 1:
                engines.append(engine)
            if number >= 6 and not is_killed.is_set() and len(engines) == 2 * len(CASES):
                is_killed.set()
                fleet.kill(engine)
                engines.append(engine)

        with ThreadPoolExecutor(2 * len(CASES)) as threads:
            running = [
                (name, threads.submit(stream, client, PATH, body_of(name), on_event=cut))
                for name in (*CASES, *CASES)
            ]
            for name, found in running:
                assert without_identity(read(found.result())) == expected[name], name
        assert is_killed.is_set()
        metrics = client.get("/metrics").text
        moved = float(metrics.partition("\nridgeline_router_continuations_total ")[2].split()[0])
        assert 0 < moved <= engines[:-1].count(engines[-1])
        fleet.kill(1 - engines[-1])
        assert client.post(PATH, json=CHAT).status_code == 503
        time.sleep(0.1)
        gone = client.post(PATH, json=CHAT)
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
        assert gone.json()["error"]["code"] == "unavailable"
        assert httpx.get(f"{fleet.router.url}/ready").status_code == 503


def test_a_replica_that_dies_is_started_again(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "ridgeline", "serve", "--replicas", "2", "--port", str(port)]
    command += ["--data-dir", str(tmp_path / "data"), "--no-log-requests"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_up(url, 2)
        replica = psutil.Process(process.pid).children()[0]
        replica.send_signal(signal.SIGKILL)
        body = {"prompt": "The sea", "max_tokens": 4, "temperature": 0}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=30) for _ in range(4)]
        assert [each.status_code for each in answers] == [200] * 4
        assert len({each.json()["choices"][0]["text"] for each in answers}) == 1
        wait_up(url, 2)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not any(each.is_running() for each in family)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)


def wait_up(url, count, seconds=300):
    deadline_s = time.monotonic() + seconds
    engines = []
    while sum(each["up"] for each in engines) < count:
        assert time.monotonic() < deadline_s, engines
        time.sleep(0.05)
        try:
            engines = httpx.get(f"{url}/ready").json()["engines"]
        except httpx.TransportError:
            continue
