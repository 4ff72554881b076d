"""What a router makes of engines that tell nonsense about themselves, and of callers who do."""

import asyncio
import json
import resource

import pytest

from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.upstream import UpstreamError, UpstreamPool

DEEP = b"[" * 200_000
STATE = {
    "ready": True, "reason": None, "is_open": False, "epoch": "a", "models": [], "max_seqs": 8,
    "kv_tokens": 1000, "pass_s": 0.01, "token_s": 1e-4, "pair_s": 1e-8,
}  # fmt: skip


def curved(tokens, seconds) -> bytes:
    curve = {"tokens": tokens, "seconds": seconds, "context_s": 0.0}
    return json.dumps(STATE | {"curve": curve}).encode()


def probed(body: bytes | None, token: bytes | None) -> RoutedEngine:
    """An engine after a probe that is answered with ``body``, or without end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                while body is None:
                    writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                    await writer.drain()
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    async def run() -> RoutedEngine:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = UpstreamPool(f"http://127.0.0.1:{port}", connect_timeout_s=1.0)
        engine = RoutedEngine("0", pool, token)
        await engine.probe(refuses_open=False)
        pool.close()
        server.close()
        return engine

    return asyncio.run(run())


def test_an_engine_that_tells_sense_is_used():
    assert probed(json.dumps(STATE).encode(), b"key").is_up
    assert probed(curved([1, 9], [0.1, 0.2]), b"key").is_up
    assert probed(b'{"data":[{"id":"a"}]}', None).state.models == ("a",)


@pytest.mark.parametrize(
    ("token", "body"),
    [
        (None, b'{"data":[{"id":"\xff\xfe"}]}'),
        (None, b'{"data":[],"more":' + DEEP),
        (None, None),
        (b"key", None),
        (b"key", json.dumps(STATE | {"kv_tokens": -999_999}).encode()),
        (b"key", json.dumps(STATE | {"max_seqs": 0}).encode()),
        (b"key", json.dumps(STATE | {"pass_s": -1.0}).encode()),
        (b"key", curved([], [])),
        (b"key", curved([1, 1], [0.1, 0.2])),
        (b"key", curved([1, 2], [0.1])),
        (b"key", curved([1, 2], [0.0, 0.1])),
        (b"key", curved([1, 2, 3], [0.1, 0.2, 0.1])),
    ],
    ids=[
        "bytes",
        "depth",
        "no end",
        "no end of a state",
        "negative",
        "no sequences",
        "prices",
        "no curve",
        "a step",
        "half a curve",
        "no time",
        "less and less time",
    ],
)
def test_an_engine_that_tells_nonsense_is_not_used_and_ends_nothing(token, body):
    engine = probed(body, token)
    assert not engine.is_up
    assert engine.reason
    assert body is not None or "answers more than" in engine.reason


def test_a_body_that_is_nested_without_end_is_left_to_the_engine():
    body = b'{"zz":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001
    path = "/v1/completions"
    request = RoutedRequest(method="POST", path=path, target=path.encode(), headers=[], body=body)
    assert request.generates
    assert request.blocks == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_tokens": -1}, 128),
        ({"max_tokens": -1, "max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": -1, "max_tokens": 7}, 7),
        ({"max_tokens": 1}, 1),
        ({}, 128),
    ],
)
def test_a_limit_of_minus_one_is_none(limits, expected):
    body = json.dumps({"prompt": "a", "stream": True, **limits}).encode()
    path = "/v1/completions"
    request = RoutedRequest(method="POST", path=path, target=path.encode(), headers=[], body=body)
    assert request.wanted.output_tokens == expected
    assert request.may_be_handed_over == (expected > 1)


def test_that_the_router_has_no_descriptor_left_is_no_fault_of_the_engines():
    """Strangers' connections took the last ones, and all streams were ended as if it were dead."""

    async def run() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = RoutedEngine("0", UpstreamPool(f"127.0.0.1:{port}", connect_timeout_s=1.0), None)
        engine.is_up = True
        most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
        try:
            for _ in range(4):
                await engine.probe(refuses_open=False)
                with pytest.raises(UpstreamError, match="ulimit") as error:
                    await engine.pool.send(b"")
                engine.lost(error.value)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        assert engine.is_up
        assert engine.breaker.allows
        server.close()

    asyncio.run(run())
