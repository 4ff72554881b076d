"""What one message may take of memory and time, whatever part of it comes without end."""

import asyncio
import gc
import json
import socket
import struct
import time
import weakref
from contextlib import suppress

import httpx
import pytest
from tests.server.running import running

from ridgeline.core.rounding import ceil_div
from ridgeline.server import http as http_module

HOST = b"Host: localhost\r\n"
CHUNKED = b"POST /health HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
ENOUGH_BYTES = 8 << 20
ENDLESS = {
    "method": (b"", b"G"),
    "target": (b"GET /", b"a"),
    "header_name": (b"GET /health HTTP/1.1\r\n", b"a"),
    "header_value": (b"GET /health HTTP/1.1\r\na: ", b"a"),
    "headers": (b"GET /health HTTP/1.1\r\n", b"a:b\r\n"),
    "empty_lines": (b"", b"\r\n"),
    "empty_lines_between": (HEALTH, b"\r\n"),
    "chunk_size": (CHUNKED, b"0"),
    "chunk_extension": (CHUNKED + b"1;", b"a"),
    "chunk_extensions": (CHUNKED, b"1;" + b"a" * 100 + b"\r\nb\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n"),
    "trailer_name": (CHUNKED + b"0\r\n", b"a"),
    "trailer_value": (CHUNKED + b"0\r\na: ", b"a"),
}


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def accepted_bytes(server, start, filler):
    """How much of the filler goes out before the server ends the connection."""
    piece, sent = filler * (65536 // len(filler)), 0
    with connect(server) as sock, suppress(ConnectionError):
        sock.sendall(start)
        while sent < ENOUGH_BYTES:
            sock.sendall(piece)
            sent += len(piece)
            time.sleep(0.001)  # for the end of the connection to arrive
    return sent


@pytest.mark.parametrize("part", ENDLESS)
def test_a_part_without_end_ends_the_connection(served, http, part):
    """4 connections with trailers took the server from 260 to 1,713 MiB, before any key."""
    assert accepted_bytes(served, *ENDLESS[part]) < ENOUGH_BYTES
    assert http.get("/health").status_code == 200


@pytest.mark.slow
def test_a_body_that_nobody_reads_is_bounded(served, http):
    """The answer (405) is there at once, and the rest of the body is dropped."""
    length = 1 << 40
    start = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % length)
    with connect(served) as sock:
        sock.sendall(start)
        with suppress(ConnectionError):
            for _ in range(600):
                sock.sendall(bytes(1 << 20))
            raise AssertionError("the connection was left open")
    assert http.get("/health").status_code == 200


def test_requests_ahead_of_their_answers_are_bounded(served, http):
    """Each takes memory until its turn comes, and a reader may take no answers."""
    assert accepted_bytes(served, b"", HEALTH) < ENOUGH_BYTES
    assert http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def hasty(roomy_folder, tmp_path_factory):
    """A server that waits 0.3 s for the parts of a message."""
    data_dir = tmp_path_factory.mktemp("hasty")
    with running(roomy_folder, data_dir=data_dir, body_timeout_s=0.3) as server:
        yield server


def read_until_closed(sock, seconds):
    """What comes until the server closes; AssertionError if it does not."""
    end_s, received = time.monotonic() + seconds, b""
    sock.settimeout(0.05)
    while time.monotonic() < end_s:
        with suppress(TimeoutError):
            piece = sock.recv(65536)
            if not piece:
                return received
            received += piece
    raise AssertionError("the connection was left open")


@pytest.mark.parametrize("part", ["body", *ENDLESS])
def test_a_part_that_trickles_ends_the_connection(hasty, part):
    body = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 1000")
    start, filler = (body, b"b") if part == "body" else ENDLESS[part]
    with connect(hasty) as sock, suppress(ConnectionError):
        sock.sendall(start)
        for index in range(60):
            at = index % len(filler)
            sock.sendall(filler[at : at + 1])
            time.sleep(0.05)
        raise AssertionError("the connection was left open")


def test_a_body_that_keeps_its_pace_may_take_longer(hasty):
    """The limit is on silence and on trickles, not on the size of an upload."""
    piece = b"x" * 8192
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    )
    end = b"\r\n--x--\r\n"
    size = len(form) + 16 * len(piece) + len(end)
    head = b"POST /v1/files HTTP/1.1\r\nConnection: close\r\n" + HOST
    head += b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: %d\r\n\r\n" % size
    with connect(hasty) as sock:
        sock.sendall(head + form)
        for _ in range(16):
            time.sleep(0.06)
            sock.sendall(piece)
        sock.sendall(end)
        assert read_until_closed(sock, 5).startswith(b"HTTP/1.1 200 ")


def test_an_answer_may_take_longer_than_its_request(hasty):
    with connect(hasty) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n\r\n")  # old clients: an empty line
        with pytest.raises(AssertionError, match="left open"):
            read_until_closed(sock, 1.0)


@pytest.mark.parametrize("pieces", [1, 3])
def test_trailers_are_refused(served, pieces):
    """They may not become headers of this request, nor of the next on the connection."""
    request = CHUNKED + b"0\r\nOrigin: http://evil.example\r\n\r\n" + HEALTH
    size = ceil_div(len(request), pieces)
    with connect(served) as sock:
        for start in range(0, len(request), size):
            sock.sendall(request[start : start + size])
            time.sleep(0.05)
        answer = read_until_closed(sock, 5)
    assert answer.count(b"HTTP/1.1 ") == 1
    if pieces == 1:
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"after the body" in answer


def test_who_leaves_with_requests_ahead_ends_the_one_that_runs(served, http, monkeypatch):
    """What is noticed of a connection is noticed of its first request, too, not of its last."""
    engine, events = served.server.engine, []

    async def endless(request):
        events.append("begun")
        try:
            while True:
                await asyncio.sleep(0.01)
                if False:
                    yield
        finally:
            events.append("ended")

    monkeypatch.setattr(engine, "generate", endless)
    body = json.dumps({"model": served.server.model_name, "prompt": [5], "max_tokens": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port)) as client:
        client.sendall(head % len(body) + body + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _await(lambda: "begun" in events)
    _await(lambda: "ended" in events)


def _await(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_crowd_that_asks_nothing_takes_no_place(roomy_folder, tmp_path, monkeypatch):
    """Before any key: who has a whole request stays, of others the one that sent the least goes."""
    monkeypatch.setattr(http_module, "_most_connections", lambda _: 8)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    upload = CHUNKED.replace(b"/health", b"/v1/completions")
    with (
        running(roomy_folder, data_dir=tmp_path) as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        for sent in (b"", b"GET /", HEALTH, upload, upload + b"1\r\na\r\n"):
            crowd = [connect(server) for _ in range(10)]
            for sock in crowd:
                with suppress(ConnectionError):
                    sock.sendall(sent)
            assert httpx.get(f"{server.url}/health").status_code == 200
            with suppress(ConnectionError):
                while crowd[0].recv(4096):
                    pass  # it is closed
            for sock in crowd:
                sock.close()
        assert "data: [DONE]" in lines


def test_nothing_is_kept_of_a_connection_that_was_reset(served, monkeypatch):
    """The timer of idle connections kept each for a minute."""
    kept, seen = weakref.WeakSet(), []
    made = http_module.BoundedHttpProtocol.connection_made

    def connection_made(protocol, transport):
        kept.add(protocol)
        seen.append(id(protocol))
        made(protocol, transport)

    monkeypatch.setattr(http_module.BoundedHttpProtocol, "connection_made", connection_made)
    for _ in range(20):
        with connect(served) as sock:
            sock.sendall(HEALTH)
            assert sock.recv(4096)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert len(seen) == 20
    until_s = time.monotonic() + 10
    while len(kept) > 2:
        assert time.monotonic() < until_s
        gc.collect()
        time.sleep(0.2)
