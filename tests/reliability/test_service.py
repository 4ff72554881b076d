"""Items 21, 26, 28 to 35 of the catalogue: what happens to processes and connections."""

import asyncio
import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tests.reliability.process import serve_process
from tests.server.running import running

LONG = {"prompt": "the cat", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "the cat", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
CHAT_PATH = "/v1/chat/completions"
FULL = pytest.param("full", marks=pytest.mark.slow)


def rounds(size, short, full):
    return full if size == "full" else short


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_request_larger_than_the_pool(roomy_folder, tmp_path, counted):
    """Item 21: refused for its size at once, and nobody behind it waits."""
    settings = {"max_model_len": 128, "kv_cache_memory_bytes": 256 << 10}
    with (
        running(roomy_folder, data_dir=tmp_path, engine=settings) as server,
        server.client() as client,
    ):
        client.post("/v1/completions", json=SHORT)
        seconds = []
        for _ in range(20):  # the fastest: another process may take the processor
            began_s = time.monotonic()
            response = client.post("/v1/completions", json={"prompt": "the cat " * 200})
            seconds.append(time.monotonic() - began_s)
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert client.post("/v1/completions", json=SHORT).status_code == 200
        assert min(seconds) < 0.1, seconds
        counted(len(seconds))


CHAT = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 8, "logprobs": True}
INSIDE = [
    ("completions", "tokenize"), ("completions", "sampling_params"), ("completions", "usage_of"),
    ("completions", "check_room"), ("completions", "generate"), ("completions", "Job"),
    ("chat", "conversation_of"), ("chat", "chat_logprobs"), ("chat", "AnswerMessage"),
    ("chat", "prepare_answer"),
]  # fmt: skip


@pytest.mark.parametrize("place", INSIDE, ids=".".join)
def test_a_failure_inside_hits_only_the_guilty(served, http, monkeypatch, place):
    """Item 26, the server's part: an exception is a 500 of fixed text, and the rest goes on.

    With the places in the engine's loop (test_engine_loop.py) these are the 20 of the catalogue.
    """
    route, name = place
    path, body = ("/v1/completions", SHORT) if route == "completions" else (CHAT_PATH, CHAT)

    def fail(*_, **__):
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(f"ridgeline.server.routes.{route}.{name}", fail)
        response = http.post(path, json=body)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert served.server.limits.running == 0
    assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", ["short", FULL])
def test_disconnects_free_their_slots(served, http, stream, size, counted):
    """Item 32: whoever leaves, streaming or not, leaves nothing behind."""
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    stats = served.server.engine.stats
    held = stats().kv_usage  # by prefixes that other tests named
    for index in range(rounds(size, 20, 500)):
        connection = socket.create_connection(address)
        connection.sendall(head % len(body) + body)
        time.sleep((index % 7) * 0.004)
        connection.close()
    wait_until(lambda: served.server.limits.running == 0, 2, "requests stay open")
    wait_until(lambda: stats().num_running + stats().num_waiting == 0, 2, "sequences still run")
    wait_until(lambda: stats().kv_usage <= held, 2, "KV is still held")
    counted(index + 1)


def test_slow_readers_slow_nobody(served, http):
    """Item 33: readers who take a byte a second beside one who reads."""
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    body = json.dumps({**LONG, "max_tokens": 60, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    before = psutil.Process().memory_info().rss
    readers = [socket.create_connection(address) for _ in range(12)]
    for reader in readers:
        reader.sendall(head % len(body) + body)
        reader.recv(1)
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    wait_until(lambda: served.server.limits.running == 0, 60, "slow readers hold the engine")
    assert psutil.Process().memory_info().rss - before < 50 << 20
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("size", ["short", FULL])
def test_text_deltas_join_to_the_full_decode(served, http, size, counted):
    """Item 34: sampled bytes of any kind; what streams is what decoding the whole gives."""
    samples = rounds(size, 4, 100)
    for seed in range(rounds(size, 4, 50)):
        body = {"prompt": "the", "max_tokens": 16, "temperature": 3.0, "seed": seed, "n": samples,
                "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
        texts, ids = [""] * samples, [[] for _ in range(samples)]
        with http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    texts[choice["index"]] += choice["text"]
                    ids[choice["index"]] += choice["token_ids"]
        for text, tokens in zip(texts, ids, strict=True):
            assert text == served.server.tokenizer.decode(tokens, skip_special_tokens=True)
            counted(1)


def test_overload_is_refused_with_retry_after(roomy_folder, tmp_path):
    """Item 35: far more than the queue takes; each is served or told when to come again."""
    with running(roomy_folder, data_dir=tmp_path, max_queue=8) as server:

        async def flood():
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
                return await asyncio.gather(
                    *(client.post("/v1/completions", json=SHORT) for _ in range(160))
                )

        answers = asyncio.run(flood())
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 8
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "server_overloaded"
        with server.client() as client:
            assert client.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.slow
@pytest.mark.alone
def test_what_is_accepted_under_overload_is_served_in_time(roomy_folder, tmp_path, counted):
    """Item 35: 20 times what the queue takes; p99 of the accepted against a queue just full.

    By the server's log, with heads and bodies in one write: a client of many connections takes tens
    of milliseconds from one to the other, and those are none of the server's.
    """
    message = wire("/v1/completions", {**SHORT, "max_tokens": 32})

    async def ask(port, times):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(times):
            writer.write(message)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            if not head.startswith(b"http/1.1 200"):
                await asyncio.sleep(int(head.partition(b"retry-after: ")[2].split()[0]))
        writer.close()

    async def flood(port, clients, times):
        await asyncio.gather(*(ask(port, times) for _ in range(clients)))

    with serve_process(roomy_folder, tmp_path / "data", "--max-queue", "8") as server:
        seconds = []
        for clients, times in ((8, 50), (160, 6)):
            before = len(log_of(server))
            asyncio.run(flood(server.port, clients, times))
            accepted = [e["seconds"] for e in log_of(server)[before:] if e["status"] == 200]
            assert len(accepted) > 100
            counted(clients * times)
            seconds.append(sorted(accepted)[int(0.99 * len(accepted))])
        assert seconds[1] <= 3 * seconds[0], seconds


def log_of(server):
    """The requests for completions that a server has logged."""
    lines = Path(server.log.name).read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry for entry in entries if entry["route"] == "/v1/completions"]


@pytest.mark.slow
@pytest.mark.alone
def test_others_keep_their_speed_beside_slow_readers(roomy_folder, tmp_path, counted):
    """Item 33: beside 50 whose buffers are full, against 50 who read as fast as they can."""
    body = {**LONG, "max_tokens": 300, "stream": True}
    text = json.dumps({**body, "logprobs": 20}).encode()  # half a megabyte for each reader
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with serve_process(roomy_folder, tmp_path / "data", "--max-num-seqs", "64") as server:

        def seconds_beside(*, reads):
            readers = [socket.socket() for _ in range(50)]
            for reader in readers:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect(("127.0.0.1", server.port))
                reader.sendall(head % len(text) + text)
                reader.setblocking(False)
            began_s = time.monotonic()
            with (
                server.client() as client,
                client.stream("POST", "/v1/completions", json=body) as r,
            ):
                for _ in r.iter_raw():
                    for reader in readers if reads else ():
                        with suppress(BlockingIOError):
                            reader.recv(1 << 20)
            seconds = time.monotonic() - began_s
            for reader in readers:
                reader.close()
            with server.client() as client:
                wait_until(lambda: is_idle(client), 30, "readers who left hold the engine")
            return seconds

        seconds_beside(reads=True)
        pairs = [(seconds_beside(reads=True), seconds_beside(reads=False)) for _ in range(4)]
        reading, slow = map(min, zip(*pairs, strict=True))
        assert slow <= reading / 0.9, pairs
        counted(50)


def is_idle(client):
    return client.get("/load").json()["num_requests_running"] == 0


def test_a_reader_who_takes_nothing_is_given_up(roomy_folder, tmp_path):
    """The buffers of the connection are full for ``stall_timeout_s``: it is closed."""
    settings = {"data_dir": tmp_path, "stall_timeout_s": 0.3}
    with running(roomy_folder, **settings) as server, server.client() as client:
        content = {"file": ("a", b"x" * (24 << 20))}
        file = client.post("/v1/files", files=content, data={"purpose": "user_data"}).json()
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=15) as connection:
            path = f"/v1/files/{file['id']}/content".encode()
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
            received = len(connection.recv(1000))
            time.sleep(1.5)
            with suppress(ConnectionResetError):
                while data := connection.recv(1 << 20):
                    received += len(data)
        assert received < 24 << 20
        whole = client.get(f"/v1/files/{file['id']}/content").content
        assert len(whole) == 24 << 20


def test_pings_break_the_silence(roomy_folder, tmp_path):
    with running(roomy_folder, data_dir=tmp_path, ping_s=0.05) as server:
        with server.client() as client, client.stream("GET", "/live") as response:
            text = b""
            for piece in response.iter_raw():
                text += piece
                if b": ping" in text:
                    break
        assert b"data: {" in text


HALF_A_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: localh", HALF_A_BODY])
def test_heads_and_bodies_that_do_not_arrive_in_time(roomy_folder, tmp_path, sent):
    with running(roomy_folder, data_dir=tmp_path, body_timeout_s=0.2) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=15) as connection:
            connection.sendall(sent)
            answer = b""
            while data := connection.recv(4096):  # a timeout here: it was left open
                answer += data
        assert answer.startswith(b"HTTP/1.1 408") if sent == HALF_A_BODY else answer == b""


@pytest.fixture(scope="module")
def process(roomy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    with serve_process(roomy_folder, folder / "data", "--drain-s", "60") as server:
        yield server


@pytest.mark.parametrize("size", ["short", FULL])
def test_killing_the_engine_under_load(process, size, counted):
    """Item 28: every request ends, none is cut short in silence, and service comes back."""
    for _ in range(rounds(size, 1, 50)):
        process.wait_ready()

        async def load():
            async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:

                async def one(index):
                    stream = index % 2 == 0
                    try:
                        answer = await client.post(
                            "/v1/completions", json={**LONG, "max_tokens": 1200, "stream": stream}
                        )
                    except httpx.TransportError as error:
                        return f"transport {error}"
                    if answer.status_code != 200:
                        return str(answer.status_code)
                    if stream and "[DONE]" not in answer.text:
                        return "told" if '"error"' in answer.text else "cut short"
                    return "finished"

                tasks = [asyncio.create_task(one(index)) for index in range(10)]
                await asyncio.sleep(0.7)
                engine = process.engine()
                engine.kill()
                return await asyncio.gather(*tasks), engine

        outcomes, dead = asyncio.run(load())
        assert set(outcomes) <= {"finished", "told", "500", "503"}, outcomes
        assert process.wait_restarted(dead) < 15
        with process.client() as client:
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            assert client.get("/health").status_code == 200
        counted(1)


@pytest.mark.parametrize("stays", [True, False])
def test_who_only_reads_is_answered_and_who_left_is_forgotten(process, stays):
    """Both look the same until something is written to them."""
    process.wait_ready()
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", process.port), timeout=30) as connection:
        connection.sendall(head % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while stays and (piece := connection.recv(65536)):
            answer += piece
    if stays:
        assert b'"completion_tokens":1500' in answer
    with process.client() as client:
        wait_until(lambda: is_idle(client), 1, "who left holds the engine")


@pytest.mark.slow
def test_a_stopped_engine_is_not_ready(process, counted):
    """Item 29: SIGSTOP shows within 10 s; after SIGCONT all is well."""
    process.wait_ready()
    engine = process.engine()
    with process.client() as client, httpx.Client(timeout=1) as other:
        engine.suspend()
        try:
            with pytest.raises(httpx.TimeoutException):
                other.post(f"{process.url}/v1/completions", json=SHORT)
            wait_until(lambda: client.get("/ready").status_code == 503, 10, "/ready stays 200")
        finally:
            engine.resume()
        process.wait_ready(30)
    counted(1)


@pytest.mark.parametrize("size", ["short", FULL])
def test_killing_the_server_leaves_nothing(roomy_folder, tmp_path, size, counted):
    """Item 30: after SIGKILL of the parent no child, port or socket is left."""
    port = None
    for index in range(rounds(size, 1, 50)):
        with serve_process(roomy_folder, tmp_path / f"data{index}", port=port) as server:
            family, port = server.family(), server.port
            assert len(family) >= 2
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            wait_until(
                lambda family=family: (
                    not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
                ),
                5,
                "an orphan is left",
            )
            with socket.create_server(("127.0.0.1", port)):
                pass
        counted(1)


def drain(server):
    """SIGTERM under load: what runs completes, new work is refused, and the exit code is 0."""

    async def load():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {**LONG, "max_tokens": 1900, "n": 2}
            tasks = []
            while (await client.get("/load")).json()["num_requests_running"] < 8:
                if all(task.done() for task in tasks):  # before anybody looked
                    posts = [client.post("/v1/completions", json=body) for _ in range(4)]
                    tasks = list(map(asyncio.create_task, posts))
                await asyncio.sleep(0.005)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
            late = await client.post("/v1/completions", json=SHORT)
            ready = await client.get("/ready")
            done = await asyncio.gather(*tasks)
            return [answer.status_code for answer in done], late, ready

    statuses, late, ready = asyncio.run(load())
    assert statuses == [200] * 4
    assert late.status_code == 503
    assert int(late.headers["retry-after"]) >= 1
    assert ready.status_code == 503
    assert server.process.wait(60) == 0


STREAM = {"max_tokens": 1900, "n": 4, "ignore_eos": True, "stream": True}
GREEDY_STREAM = {"temperature": 0, "stream": True}  # which meets no end of its own
MESSAGES = [{"role": "user", "content": "the cat"}]
UPLOAD = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000\r\n"
UPLOAD += b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"


def wire(path, body, version="1.1"):
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


CUT = {
    "stream": wire("/v1/completions", {"prompt": "the cat", **STREAM}),
    "old_stream": wire("/v1/completions", {"prompt": "the cat", **STREAM}, version="1.0"),
    "chat": wire(CHAT_PATH, {"messages": MESSAGES, **STREAM}),
    "message": wire("/v1/messages", {"messages": MESSAGES, "max_tokens": 1900, **GREEDY_STREAM}),
    "response": wire("/v1/responses", {"input": "a", "max_output_tokens": 1900, **GREEDY_STREAM}),
    "whole": wire("/v1/completions", {"prompt": "the cat", **STREAM, "stream": False}),
    "live": b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "upload": UPLOAD,
}  # fmt: skip


def test_what_the_drain_cuts_is_told_so(roomy_folder, tmp_path):
    """No stream ends as if it were whole, over HTTP/1.0 neither, and no reader holds the end up."""
    options = ("--drain-s", "0.2", "--max-num-seqs", "32")
    with serve_process(roomy_folder, tmp_path / "data", *options) as server:
        address = ("127.0.0.1", server.port)
        connections = {name: socket.create_connection(address, timeout=15) for name in CUT}
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(address)
        body = {"prompt": "a", **STREAM, "n": 8, "logprobs": 20}
        deaf.sendall(wire("/v1/completions", body))
        for name, connection in connections.items():
            connection.sendall(CUT[name])
        answers = {
            name: connection.recv(1) if name not in ("whole", "upload") else b""
            for name, connection in connections.items()
        }
        with server.client() as client:

            def begun():
                return client.get("/load").json()["server_load"] == len(CUT) - 1

            wait_until(begun, 10, "the streams have not begun")
        server.process.send_signal(signal.SIGTERM)
        for name, connection in connections.items():
            while piece := connection.recv(65536):
                answers[name] += piece
            connection.close()
        assert server.process.wait(20) == 0
        deaf.close()
        log = Path(server.log.name).read_text()
    for name, answer in answers.items():
        assert b"The server is shutting down." in answer[-1000:], (name, answer[-1000:])
        assert b"[DONE]" not in answer, name
    for name in ("whole", "upload"):
        assert answers[name].startswith(b"HTTP/1.1 503 "), name
    assert b"event: error" in answers["message"]
    assert "Traceback" not in log, log
    assert "Cancel " not in log, log


@pytest.mark.slow
def test_sigterm_drains_every_time(roomy_folder, tmp_path, counted):
    """Item 31."""
    for index in range(50):
        with serve_process(roomy_folder, tmp_path / f"data{index}") as server:
            drain(server)
        counted(1)


def test_sigterm_drains(process):
    """Item 31; the last test that uses the process."""
    process.wait_ready()
    drain(process)
