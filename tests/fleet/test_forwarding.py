"""What the router makes of engines that answer wrongly, late, or not at all.

The engines here are scripts, so that each does wrong what the test says; those of `test_router`
are real.
"""

import asyncio
import socket
import threading
import time
from contextlib import closing, contextmanager

import httpx
import pytest
from tests.fleet.conftest import KEY

from ridgeline.core.errors import SettingsError
from ridgeline.fleet import serving
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.router import Router
from ridgeline.server.continuation import HANDED_OVER, MARK, ROUTER_KEY, router_token
from ridgeline.server.serving import open_listener

STATE = (
    b'{"ready":true,"reason":"","is_open":true,"epoch":"e","models":["m"],"max_seqs":8,'
    b'"kv_tokens":1000,"pass_s":0.01,"token_s":0.0001,"pair_s":0}'
)
BODY = {"prompt": "a", "max_tokens": 4}


def answer(status, body=b"{}", *headers):
    lines = [b"HTTP/1.1 %d X" % status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def events(*parts):
    fields = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
    head = b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % fields
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


class Script(asyncio.Protocol):
    """An engine: what it answers, one after another, to requests that are no probes."""

    def __init__(self, answers, seen, model):
        self._answers, self._seen, self._data = answers, seen, b""
        self._state = STATE.replace(b'["m"]', b'["%b"]' % model)

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        if data.startswith(b"GET /fleet/state"):
            self._transport.write(answer(200, self._state))
            return
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self._seen.append(self._data)
        self._data = b""
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if found is not None:
            self._transport.write(found)
            if b"chunked" in found and not found.endswith(b"0\r\n\r\n"):
                self._transport.close()


@contextmanager
def routed(tmp_path, *scripts, models=None, **settings):
    """A client of a router before scripted engines, and what each engine was sent."""
    models = models or [b"m"] * len(scripts)
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    ready, holder = threading.Event(), {}
    seen = [[] for _ in scripts]

    async def main():
        loop = asyncio.get_running_loop()
        holder["loop"], holder["stop"] = loop, asyncio.Event()
        servers = [
            await loop.create_server(lambda a=a, s=s, m=m: Script(a, s, m), "127.0.0.1", 0)
            for a, s, m in zip(scripts, seen, models, strict=True)
        ]
        urls = [f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers]
        config = RouterConfig(
            policy="round-robin",
            port=0,
            **{
                "engine": tuple(urls),
                "router_key_file": str(key_file),
                "recover_s": 0.3,
                "drain_s": 0.1,
            }
            | settings,
        )
        with closing(open_listener(config)) as listener:
            holder["router"] = Router(config)
            await serving.run(
                holder["router"],
                listener,
                announce=lambda _: None,
                on_listening=lambda url: (holder.update(url=url), ready.set()),
                stopping=holder["stop"],
            )
        for each in servers:
            each.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    try:
        with httpx.Client(base_url=holder["url"], timeout=10) as client:
            yield client, seen
    finally:
        holder["loop"].call_soon_threadsafe(holder["stop"].set)
        thread.join(10)


@pytest.mark.parametrize("bad", [500, 502, 503, 429])
def test_what_another_engine_may_answer_is_asked_of_another(tmp_path, bad):
    with routed(tmp_path, [answer(bad, b"bad")], [answer(200, b"good")]) as (client, seen):
        found = client.post("/v1/completions", json=BODY)
    assert (found.status_code, found.content) == (200, b"good")
    assert found.headers["x-ridgeline-engine"] == "1"
    assert [len(each) for each in seen] == [1, 1]


def test_an_engine_of_another_model_is_not_used(tmp_path):
    scripts = [answer(200, b"good")], [answer(200, b"bad")]
    with routed(tmp_path, *scripts, models=[b"m", b"other"]) as (client, seen):
        for _ in range(4):
            assert client.post("/v1/completions", json=BODY).content == b"good"
        other = client.get("/ready").json()["engines"][1]
    assert (other["up"], other["reason"]) == (False, "It serves other, where the others serve m.")
    assert [len(each) for each in seen] == [4, 0]


def test_a_refusal_of_all_is_the_callers(tmp_path):
    refusal = answer(503, b"full", b"retry-after: 7")
    with routed(tmp_path, [refusal], [refusal]) as (client, seen):
        found = client.post("/v1/completions", json=BODY)
        assert (found.status_code, found.headers["retry-after"]) == (503, "7")
        again = client.post("/v1/completions", json=BODY)  # nobody is asked before that
    assert (again.status_code, again.headers["retry-after"]) == (503, "1")
    assert [len(each) for each in seen] == [1, 1]


def test_the_callers_mistake_is_told_at_once_and_opens_nothing(tmp_path):
    with routed(tmp_path, [answer(400, b"wrong")]) as (client, seen):
        for _ in range(5):
            assert client.post("/v1/completions", json=BODY).status_code == 400
    assert len(seen[0]) == 5


@pytest.mark.parametrize("broken", [b"HTTP/1.1 200", b"nonsense\r\n\r\n", events(), None])
def test_what_breaks_off_before_a_byte_is_sent_again(tmp_path, broken):
    with routed(tmp_path, [broken], [answer(200, b"good")], answer_timeout_s=0.3) as (client, seen):
        found = client.post("/v1/completions", json=BODY | {"stream": True})
    assert (found.status_code, found.content) == (200, b"good")
    assert [len(each) for each in seen] == [1, 1]


def test_a_stream_goes_on_after_its_last_whole_event(tmp_path):
    def event(token, text):
        mark = MARK + b"0 %d\n" % token
        data = b'data: {"id":"x","created":5,"choices":[{"index":0,"text":"%b"}]}\n\n' % text
        return mark + data

    first = events(event(3, b"a"), event(4, b"b"), event(5, b"c")[:40])
    done = event(5, b"c"), b"data: [DONE]\n\n"
    with routed(tmp_path, [first], [events(*done) + b"0\r\n\r\n"]) as (client, seen):
        found = client.post("/v1/completions", json=BODY | {"stream": True}).content
    assert found == b"".join(part.split(b"\n", 1)[1] if MARK in part else part
                             for part in (event(3, b"a"), event(4, b"b"), *done))  # fmt: skip
    head, _, body = seen[1][0].partition(b"\r\n\r\n")
    state = b'{"id":"x","created":5,"choices":{"0":{"token_ids":[3,4],"is_finished":false}}}'
    assert body.startswith(state + b'{"prompt"')
    assert b"x-ridgeline-state-bytes: %d" % len(state) in head


def test_a_stream_that_cannot_go_on_says_so(tmp_path):
    unmarked = events(b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n', b"data: {")
    with routed(tmp_path, [unmarked], [unmarked]) as (client, _):
        found = client.post("/v1/completions", json=BODY | {"stream": True}).content
        marked = events(MARK + b'0 3\ndata: {"id":"x","created":5,"choices":[]}\n\n'
                        b'data: {"error":{"type":"invalid_request_error"}}\n\n')  # fmt: skip
    assert found.count(b"data: ") == 2
    assert b'"code":"unavailable"' in found
    with routed(tmp_path, [marked + b"0\r\n\r\n"], [answer(200)]) as (client, seen):
        found = client.post("/v1/completions", json=BODY | {"stream": True}).content
    assert found.endswith(b'data: {"error":{"type":"invalid_request_error"}}\n\n')
    assert not seen[1]


@pytest.mark.parametrize("num_engines", [2, 3])
@pytest.mark.parametrize("end", [b"data: {", HANDED_OVER], ids=["broken off", "handed over"])
def test_engines_that_refuse_the_rest_of_a_stream_are_asked_now_and_then_and_not_for_ever(
    tmp_path, end, num_engines
):
    begun = MARK + b'0 3\ndata: {"id":"x","created":5,"choices":[]}\n\n'
    first = events(begun, end) + (b"0\r\n\r\n" if end == HANDED_OVER else b"")
    refusal = answer(429, b"no", b"retry-after: 1")
    others = [[refusal]] * (num_engines - 1)
    with routed(tmp_path, [first, refusal], *others) as (client, seen):
        found = client.post("/v1/completions", json=BODY | {"stream": True}).content
    assert found.count(b"data: ") == 2
    assert b'"code":"unavailable"' in found
    assert num_engines <= sum(map(len, seen)) < 12


def test_what_changes_something_is_not_sent_twice(tmp_path):
    with routed(tmp_path, [None], [answer(200)], answer_timeout_s=0.3) as (client, seen):
        found = client.post("/v1/batches", json={})
        assert (found.status_code, "not known" in found.text) == (503, True)
        assert client.delete("/admin/tenants/a").status_code == 503
        assert client.post("/v1/messages/batches", json={}).status_code == 503
        named = client.post("/v1/completions", json=BODY | {"cached_content": "cc-1"})
        assert named.status_code == 503
    assert not seen[1]


def test_the_routers_own_headers_are_its_own(tmp_path):
    with routed(tmp_path, [answer(200)]) as (client, seen):
        spoofed = {"x-ridgeline-state-bytes": "3", "x-ridgeline-router-key": "guess"}
        client.post("/v1/completions", json=BODY, headers=spoofed)
        assert client.get("/admin/usage").status_code == 501
        own = client.get("/fleet/state").json()  # and not that of an engine
        assert own.keys() == {"engines", "cascade", "starting", "autoscaler"}
        assert client.post("/v1/completions", content=b"x" * (2 << 20)).status_code == 200
    assert b"state-bytes" not in seen[0][0]
    assert b"guess" not in seen[0][0]


def test_engines_come_by_the_routers_own_key_where_none_is_up(tmp_path):
    with routed(tmp_path, [answer(200)], engine=("http://127.0.0.1:9",)) as (client, _):
        assert client.get("/admin/engines").status_code == 503
        wrong = {ROUTER_KEY: router_token(bytes(32))}
        assert client.get("/admin/engines", headers=wrong).status_code == 503
        shown = {ROUTER_KEY: router_token(KEY)}
        assert client.get("/admin/engines", headers=shown).json()["engines"][0]["up"] is False
        assert (
            client.post("/admin/engines", headers=shown, json={"url": "http://x/y"}).status_code
            == 400
        )


def test_headers_of_one_connection_are_not_passed_on(tmp_path):
    back = b"connection: x-mine, close", b"x-mine: 1", b"x-kept: 2"
    with routed(tmp_path, [answer(200, b"{}", *back)]) as (client, seen):
        sent = {"connection": "keep-alive, X-Hop", "x-hop": "3", "x-through": "4"}
        found = client.post("/v1/completions", json=BODY, headers=sent)
    assert "x-mine" not in found.headers
    assert found.headers["x-kept"] == "2"
    assert b"x-hop" not in seen[0][0].lower()
    assert b"x-through: 4" in seen[0][0].lower()


def test_a_public_router_uses_no_engine_without_keys(tmp_path):
    with routed(tmp_path, [answer(200)], host="0.0.0.0") as (client, seen):
        port = client.base_url.port
        found = httpx.get(f"http://127.0.0.1:{port}/ready")
        assert (found.status_code, "asks for no keys" in found.text) == (503, True)
        answered = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY)
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "1")
    assert not seen[0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"engine": ("http://a:1", "http://a:1")}, {"engine": ("http://a:1/v1",), "port": 0}],
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(SettingsError, match=r"engine"):
        serving.Router(RouterConfig(**settings))


def _lines(*parts):
    """Lines of JSON of unknown length, as Ollama streams."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked"
    return head + b"\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in parts)


@pytest.mark.parametrize(
    ("path", "begun"),
    [
        ("/v1/messages", events(b'event: a\ndata: {"type":"message_start"}\n\n')),
        ("/v1/responses", events(b'event: a\ndata: {"type":"response.created"}\n\n')),
        ("/api/chat", _lines(b'{"message":{"content":"a"}}\n')),
    ],
)
def test_what_a_client_has_of_another_stream_is_never_sent_again(tmp_path, path, begun):
    with routed(tmp_path, [begun], [begun + b"0\r\n\r\n"]) as (client, seen):
        found = client.post(path, json=BODY | {"stream": True}).content
    assert [len(each) for each in seen] == [1, 0]
    assert found.startswith(begun.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1])
    assert found.count(b"message_start") + found.count(b".created") + found.count(b"content") == 1
    assert b"closed the connection" in found
    assert (b"event: error\ndata: " in found) == (path == "/v1/messages")


def test_half_of_an_answer_is_seen_to_be_half(tmp_path):
    half = _lines(b'{"message":')
    with (
        routed(tmp_path, [half], [answer(200)]) as (client, seen),
        pytest.raises(httpx.RemoteProtocolError),
    ):
        client.post("/api/chat", json=BODY | {"stream": True})
    assert not seen[1]


@pytest.mark.parametrize(
    "event", [b"\xff", b"[" * 100_000, b'{"id":7}', b'{"created":"x"}'], ids=lambda e: str(e[:9])
)
def test_a_stream_of_events_that_cannot_be_read_passes_and_ends_with_an_error(tmp_path, event):
    parts = b"data: " + event + b"\n\n", b"data: " + b"9" * 70_000 + b"\n\n"
    with routed(tmp_path, [events(*parts)], [answer(200)]) as (client, seen):
        found = client.post("/v1/completions", json=BODY | {"stream": True}).content
    assert found.startswith(b"".join(parts))
    assert b'"code":"unavailable"' in found
    assert [len(each) for each in seen] == [1, 0]


@pytest.mark.parametrize("status", [400, 500])
def test_an_answer_without_end_is_not_kept(tmp_path, caplog, status):
    head = b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status
    endless = head + b"100000\r\n%b\r\n" % (b"x" * (1 << 20)) * 12
    with (
        routed(tmp_path, [endless], [answer(200, b"good")]) as (client, _),
        client.stream("POST", "/v1/completions", json=BODY) as found,
    ):
        assert found.status_code == (200 if status == 500 else 400)
        assert next(found.iter_raw())[:4] == (b"good" if status == 500 else b"xxxx")
    assert ("answers more than" in caplog.text) == (status == 500)


def test_an_answer_without_end_to_what_all_are_asked_is_not_kept(tmp_path):
    head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n"
    endless = head + b"100000\r\n%b\r\n" % (b"x" * (1 << 20)) * 12
    with routed(tmp_path, [endless]) as (client, _):
        found = client.delete("/admin/tenants/a")
    assert (found.status_code, "answers more than" in found.text) == (503, True)


@pytest.mark.parametrize(
    "name", [b"x-a: ", b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-a: "]
)
def test_headers_without_end_are_not_kept(tmp_path, caplog, name):
    endless = b"HTTP/1.1 500 X\r\n" + name + b"x" * (1 << 20)
    with routed(tmp_path, [endless], [answer(200, b"good")]) as (client, _):
        found = client.post("/v1/completions", json=BODY)
    assert found.content == b"good"
    assert "is not HTTP" in caplog.text


def test_what_follows_an_answer_is_none_of_it(tmp_path):
    with routed(tmp_path, [answer(200, b"good") + answer(200, b"bad")]) as (client, _):
        found = client.post("/v1/completions", json=BODY)
    assert b"bad" not in found.content


def test_a_client_that_does_not_read_is_no_silence_of_the_engine(tmp_path, caplog):
    event = MARK + b'0 3\ndata: {"id":"x","created":5,"choices":[],"a":"%b"}\n\n' % (b"x" * 60_000)
    done = b"data: [DONE]\n\n"
    whole = events(*[event] * 400, done) + b"0\r\n\r\n"
    with (
        routed(tmp_path, [whole], [answer(200)], silence_s=1.0, probe_s=9.0) as (client, seen),
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as found,
    ):
        time.sleep(2.2)
        data = b"".join(found.iter_raw())
    assert data.count(b'"id":"x"') == 400
    assert data.endswith(done)
    assert "fallen silent" not in caplog.text
    assert [len(each) for each in seen] == [1, 0]


def test_bodies_of_callers_without_a_key_do_not_fill_the_memory(tmp_path):
    """32 of the largest at once; what is small passes beside them, and all once they have gone."""
    with routed(tmp_path, [answer(200, b"good")], max_body_mib=1) as (client, _):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n"
        port, slow = client.base_url.port, []
        large = {"prompt": "a" * 700_000}

        def is_full():
            for _ in range(16):
                slow.append(socket.create_connection(("127.0.0.1", port)))
                slow[-1].sendall(head + b"x" * 500_000)
            return client.post("/v1/completions", json=large).status_code == 503

        until(is_full)
        refused = client.post("/v1/completions", json=large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.post("/v1/completions", json=BODY).content == b"good"
        for each in slow:
            each.close()
        until(lambda: client.post("/v1/completions", json=large).status_code == 200)


def until(condition, seconds=5):
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
