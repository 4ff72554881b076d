"""Who may come in: every route of the table, with and without a key, on paths as they are sent."""

import asyncio
import base64
import dataclasses
import http.client
import json
import logging

import pytest
from tests.server.key_digests import digest
from tests.server.running import running

from ridgeline.core.errors import SettingsError
from ridgeline.server.access import PUBLIC_PATH, Access
from ridgeline.server.app import all_operations
from ridgeline.server.config import ServerConfig
from ridgeline.server.continuation import ROUTER_KEY, router_token
from ridgeline.server.errors import ApiError
from ridgeline.server.keys import KeyRing
from ridgeline.server.origins import Origins

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
PATHS = sorted({operation.path.replace(":path", "") for operation in all_operations()})
SLOW, FAST, ADMIN = "slow-key", "fast-key", "admin-key"
TOKEN = router_token(bytes(32)).decode()


@pytest.fixture(scope="module")
def guarded(roomy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.toml").write_text(
        f"""
        admin_sha256 = "{digest(ADMIN)}"
        [[key]]
        name = "slow"
        sha256 = "{digest(SLOW)}"
        requests_per_minute = 3
        input_tokens_per_minute = 50
        output_tokens_per_minute = 20
        concurrency = 1
        models = ["tiny"]
        [[key]]
        name = "fast"
        sha256 = "{digest(FAST)}"
        """
    )
    with running(
        roomy_folder,
        data_dir=folder / "data",
        api_key_file=str(folder / "keys.toml"),
        served_model_name="tiny",
        allow_origin=("https://app.example/",),
    ) as server:
        yield server


def raw(server, method, path, headers=()):
    """One request exactly as written; returns status and body."""
    port = int(server.url.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    names = {name.lower() for name, _ in headers}
    for name, value in (*(() if "host" in names else (("host", "x"),)), *headers):
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


@pytest.mark.parametrize("path", PATHS)
def test_no_route_answers_without_a_key(guarded, path, counted):
    """Item 1: generated from the router's table, so that a new route is guarded or fails here."""
    for method in METHODS:
        for headers in ((), (("host", "a/?x="),), (("authorization", "Bearer "),)):
            status, _ = raw(guarded, method, path.replace("{", "").replace("}", ""), headers)
            is_public = path.encode() == PUBLIC_PATH and method in ("GET", "HEAD")
            assert status == (200 if is_public else 401), (method, path, headers)
            counted(1)


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1/../v1/models", "/health/../metrics", "/health/", "/health?x=/metrics",
     "/%68ealth", "/health%2f..%2fmetrics", "/HEALTH", "/health;/metrics", "http://a/metrics",
     "/health/%2e%2e/metrics", "/./health", "/nothing", "/v1/models%00", "/health%0d%0ax:y"],
)  # fmt: skip
def test_no_spelling_gets_past(guarded, path):
    status, body = raw(guarded, "GET", path)
    assert status in (400, 401) or body == b'{"status":"ok"}', path


WRONG = ["slow-ke", "slow-key ", "SLOW-KEY", "slow-key\0", "x" * 5000, "Bearer slow-key"]


@pytest.mark.parametrize("key", WRONG)
def test_wrong_keys(guarded, key):
    with guarded.client() as client:
        headers = {"x-api-key": key.replace("\0", "%00") or "none"}
        if key != "slow-key ":  # HTTP itself drops space at the end
            assert client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {FAST}"},
        {"authorization": f"bearer {FAST}"},
        {"x-api-key": FAST},
    ],
)
def test_three_ways_to_send_a_key(guarded, headers):
    with guarded.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "other", "status"),
    [
        (f"Bearer {FAST}", FAST, 200),
        (f"Bearer {FAST}", ADMIN, 401),
        (f"Bearer {ADMIN}", FAST, 401),
        (f"Bearer {FAST}", "nonsense", 401),
        ("Bearer nonsense", FAST, 401),
        ("Basic " + base64.b64encode(b"a:" + FAST.encode()).decode(), SLOW, 401),
        ("Basic !", FAST, 401),
        ("Bearer", FAST, 200),
        ("", FAST, 200),
    ],
)
def test_two_keys_are_refused_unless_they_are_one(guarded, authorization, other, status):
    """A proxy that counts or logs by one header must not be told another than we are."""
    with guarded.client(headers={"authorization": authorization, "x-api-key": other}) as client:
        assert client.get("/v1/models").status_code == status
        assert client.get("/health").status_code == 200


def test_a_browser_sends_the_key_as_a_password(guarded):
    with guarded.client(auth=("anyone", FAST)) as client:
        assert client.get("/").status_code == 200
    with guarded.client() as client:
        assert "Basic" in client.get("/").headers["www-authenticate"]


def test_other_origins_are_refused_unless_allowed(guarded):
    with guarded.client(headers={"x-api-key": FAST}) as client:
        refused = client.post("/tokenize", json={"prompt": "a"}, headers={"origin": "https://evil"})
        assert refused.status_code == 403
        allowed = {"origin": "https://app.example"}
        response = client.post("/tokenize", json={"prompt": "a"}, headers=allowed)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        same = client.post("/tokenize", json={"prompt": "a"}, headers={"origin": guarded.url})
        assert same.status_code == 200
        assert "access-control-allow-origin" not in same.headers
    with guarded.client() as client:
        assert client.options("/v1/models", headers=allowed).status_code == 204


def test_a_preflight_allows_the_headers_that_sdks_send(guarded):
    allowed = {"origin": "https://app.example"}
    asked = {"access-control-request-headers": "X-Stainless-OS, authorization,a b,\tx-api-key,c;d,"}
    with guarded.client() as client:
        path = "/v1/chat/completions"
        headers = client.options(path, headers={**allowed, **asked}).headers
        names = headers["access-control-allow-headers"]
        assert names == "X-Stainless-OS, authorization, x-api-key"
        refused = client.options(path, headers={"origin": "https://evil", **asked})
        assert refused.status_code == 401
        assert "access-control-allow-headers" not in refused.headers
        answer = client.get("/v1/models", headers={**allowed, "x-api-key": FAST})
        assert "retry-after" in answer.headers["access-control-expose-headers"]


def test_every_origin_may_be_allowed_but_not_with_what_a_browser_keeps(roomy_folder, tmp_path):
    settings = {"api_key": (FAST,), "allow_origin": ("*", "https://app.example")}
    origin = {"origin": "https://any.example"}
    with (
        running(roomy_folder, data_dir=tmp_path, **settings) as server,
        server.client(headers=origin) as client,
    ):
        preflight = client.options("/v1/models")
        answer = client.get("/v1/models", headers={"x-api-key": FAST})
        assert (preflight.status_code, answer.status_code) == (204, 200)
        for response in (preflight, answer):
            assert response.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in response.headers
        assert client.get("/v1/models", auth=("anyone", FAST)).status_code == 403
        named = {"origin": "https://app.example"}
        assert client.get("/v1/models", auth=("anyone", FAST), headers=named).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("http://localhost:3000/", b"http://localhost:3000"),
        ("HTTPS://App.Example:443", b"https://app.example"),
        ("http://app.example:443", b"http://app.example:443"),
        ("http://[::1]:80", b"http://[::1]"),
        ("chrome-extension://abcdef", b"chrome-extension://abcdef"),
        ("*", b"null"),
    ],
)
def test_an_origin_is_what_a_browser_sends(given, sent):
    origins = Origins(ServerConfig(allow_origin=(given,)).allow_origin)
    assert origins.allows(sent)
    assert not origins.allows(None)
    assert origins.allows(b"https://evil") == (given == "*")


@pytest.mark.parametrize(
    "origin",
    ["", "localhost:3000", "http://", "https://a.example/page", "https://*.a.example", "null",
     "https://a b", "https://a:port", "https://me@a.example", "https://a\n"],
)  # fmt: skip
def test_what_is_no_origin_is_refused_at_once(origin):
    with pytest.raises(SettingsError, match="allow_origin must be"):
        ServerConfig(allow_origin=("https://a.example", origin))


@pytest.mark.parametrize("key", [FAST, "wrong"])
def test_anthropics_sdk_finds_the_id_of_its_request(guarded, key):
    with guarded.client(headers={"x-api-key": key}) as client:
        for path, is_there in (("/v1/messages", True), ("/v1/completions", False)):
            headers = client.post(path, json={}).headers
            assert headers["x-request-id"]
            assert headers.get("request-id") == (headers["x-request-id"] if is_there else None)


def test_without_keys_only_this_machine(served):
    assert raw(served, "GET", "/v1/models", [("host", "evil.example")])[0] == 403
    assert raw(served, "GET", "/v1/models", [("host", "localhost:1")])[0] == 200
    assert raw(served, "GET", "/v1/models", [("host", "[::1]")])[0] == 200
    with pytest.raises(SettingsError, match="--api-key"):
        ServerConfig(host="0.0.0.0")
    ServerConfig(host="0.0.0.0", api_key=("k",))


def test_admin_endpoints_need_the_admin_key(guarded):
    with guarded.client() as client:
        as_user = client.get("/admin/usage", headers={"x-api-key": FAST})
        assert as_user.status_code == 403
        usage = client.get("/admin/usage", headers={"x-api-key": ADMIN}).json()
    assert usage["object"] == "list"


def test_without_any_key_whoever_is_on_this_machine_is_the_admin(served, roomy_folder, tmp_path):
    with served.client() as client:
        assert client.get("/admin/usage").status_code == 200
    key = {"admin_api_key": "a" * 32}
    with running(roomy_folder, data_dir=tmp_path, **key) as server, server.client() as client:
        assert client.get("/v1/models").status_code == 200
        refused = client.get("/admin/usage")
    assert refused.status_code == 403
    assert "--admin-api-key" in refused.json()["error"]["message"]


def test_what_others_use_is_the_admins_to_see(guarded):
    body = {"prompt": "the cat", "max_tokens": 1}
    with guarded.client(headers={"x-api-key": FAST}) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        for key, count in ((FAST, 0), (ADMIN, 1)):
            text = client.get("/metrics", headers={"x-api-key": key}).text
            assert "ridgeline:generation_tokens_total" in text
            assert text.count('ridgeline:tenant_tokens_total{kind="output",tenant="fast"}') == count
            assert ("tenant" in text) == bool(count)


def test_limits_of_a_key(guarded):
    body = {"prompt": "the cat", "max_tokens": 8, "ignore_eos": True}
    with guarded.client(headers={"x-api-key": SLOW}) as client:
        other = client.post("/v1/completions", json={**body, "model": "other"})
        assert other.status_code == 404
        too_long = client.post("/v1/completions", json={**body, "prompt": "the cat " * 40})
        assert too_long.status_code == 413
        for _ in range(2):
            assert client.post("/v1/completions", json=body).status_code == 200
        limited = client.post("/v1/completions", json=body)
        assert limited.status_code == 429
        assert 1 <= int(limited.headers["retry-after"]) <= 60
        assert limited.json()["error"]["type"] == "rate_limit_error"
    with guarded.client(headers={"x-api-key": FAST}) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        usage = client.get("/admin/usage", headers={"x-api-key": ADMIN}).json()["data"]
    (slow,) = [entry for entry in usage if entry["tenant"] == "slow"]
    assert slow["output"] == 16


def test_tenants_do_not_share_prefixes_or_files(guarded):
    """Item 15 over HTTP: what one key has cached is not found by another."""
    body = {"prompt": "on the mat the cat sat " * 4, "max_tokens": 1}
    with guarded.client(headers={"x-api-key": FAST}) as fast:
        fast.post("/v1/completions", json=body)
        again = fast.post("/v1/completions", json=body).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > 0
        salted = fast.post("/v1/completions", json={**body, "cache_salt": "x"}).json()["usage"]
        assert salted["prompt_tokens_details"]["cached_tokens"] == 0
        file = fast.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"})
    with guarded.client(headers={"x-api-key": ADMIN}) as other:
        usage = other.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert other.get(f"/v1/files/{file.json()['id']}").status_code == 404
        assert other.get("/v1/files").json()["data"] == []


@pytest.mark.slow
def test_no_prefix_of_another_key_is_ever_found(guarded, counted):
    """Item 15: a thousand prompts that one key has just cached, asked for with another's."""
    own = hits = 0
    with (
        guarded.client(headers={"x-api-key": FAST}) as fast,
        guarded.client(headers={"x-api-key": ADMIN}) as other,
    ):
        for number in range(1000):
            body = {"prompt": [number // 250 + 1, number % 250 + 1] * 12, "max_tokens": 1}
            for client in (fast, fast, other):
                usage = client.post("/v1/completions", json=body).json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                own += bool(cached) and client is fast
                hits += bool(cached) and client is other
    assert own >= 1000
    assert hits == 0
    counted(1000)


def test_work_of_a_tenant_whose_key_is_gone_may_use_no_model(guarded):
    server = guarded.server
    server.check_model("tiny", server.keys.of_tenant("slow"))
    server.check_model("tiny", server.keys.of_tenant("fast"))
    with pytest.raises(ApiError, match="no model"):
        server.check_model("tiny", server.keys.of_tenant("revoked"))
    assert KeyRing(ServerConfig()).of_tenant("local").limits.models is None


def through(server, respond=lambda _: 200, *, path="/nothing", key=FAST, **headers):
    """Status and headers of an answer behind the layer, of an app that ``respond`` stands for."""
    sent = []

    async def app(scope, receive, send):
        status = respond(scope["state"]["call"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def keep(message):
        sent.append(message)

    headers = {"x-api-key": key} | {name.replace("_", "-"): text for name, text in headers.items()}
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
    }
    asyncio.run(Access(app, server)(scope, None, keep))
    return sent[0]["status"], {name.decode(): text.decode() for name, text in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("path", "shown", "status"),
    [
        ("/fleet/state", TOKEN, 200),
        ("/fleet/state", "another", 403),
        ("/fleet/state", None, 401),
        ("/v1/models", TOKEN, 401),
    ],
)
def test_a_router_shows_its_key_for_the_state_alone(guarded, monkeypatch, path, shown, status):
    monkeypatch.setattr(guarded.server, "router_key", bytes(32))
    headers = {} if shown is None else {ROUTER_KEY.decode(): shown}
    assert through(guarded.server, path=path, key="", **headers)[0] == status
    assert through(guarded.server, path=path)[0] == 200


@pytest.mark.parametrize("count", [33, 32, 0])
def test_a_header_names_the_first_32_fields_that_were_ignored(guarded, count):
    names = [f"f{number}" for number in range(count)][2:]
    names = ["a\r\nb", "x" * 100, *names] if count else []
    _, headers = through(guarded.server, lambda call: call.ignored_fields.extend(names) or 200)
    listed = headers.get("x-ridgeline-warning", "").removeprefix("ignored fields: ").split(", ")
    if not count:
        assert listed == [""]
        return
    assert listed[:32] == ["a??b", "x" * 80, *(f"f{number}" for number in range(2, 32))]
    assert listed[32:] == (["and 1 more"] if count > 32 else [])


@pytest.mark.parametrize(
    ("hits", "told"),
    [
        ([None, "a-1", "a-2"], "hit 2 of 3; id=a-1"),
        ([None, None], "miss"),
        (["a-1", "a-2"], "hit; id=a-1"),
        ([], None),
    ],
)
def test_a_header_says_whether_answers_were_kept(guarded, hits, told):
    _, headers = through(guarded.server, lambda call: call.cache_hits.extend(hits) or 200)
    assert headers.get("x-ridgeline-cache") == told


def test_a_request_keeps_an_id_that_is_short_and_plain(guarded):
    for given in ("a", "A-b_9" * 20, "x" * 128):
        assert through(guarded.server, x_request_id=given)[1]["x-request-id"] == given
    for given in ("", "-_", "a b", "a.b", "é", "x" * 129):
        found = through(guarded.server, x_request_id=given)[1]["x-request-id"]
        assert found.startswith("req-") and found != given


def test_a_line_of_the_log_has_the_path_of_what_has_no_route_alone(guarded, monkeypatch, caplog):
    config = dataclasses.replace(guarded.server.config, log_requests=True)
    monkeypatch.setattr(guarded.server, "config", config)
    caplog.set_level(logging.INFO, logger="ridgeline.requests")

    def respond(call):
        call.path = route
        return status

    for route, status, key in (
        ("other", 404, FAST),
        ("/v1/files/{id}", 404, FAST),
        ("other", 405, FAST),
        ("/v1/models", 200, FAST),
        ("other", 404, "wrong"),
    ):
        caplog.clear()
        found, _ = through(guarded.server, respond, path="/sent", key=key)
        (line,) = [json.loads(record.getMessage()) for record in caplog.records]
        is_refused = key == "wrong"
        assert found == line["status"] == (401 if is_refused else status)
        assert line["route"] == ("refused" if is_refused else route)
        assert line.get("path") == (
            "/sent" if (route, status, key) == ("other", 404, FAST) else None
        )
        assert 0 <= line["seconds"] < 60


def test_of_two_keys_it_is_said_that_they_must_be_the_same(guarded):
    twice = {"authorization": f"Bearer {ADMIN}", "x-api-key": FAST}
    for sent in ({}, *({name: "wrong"} for name in twice), twice):
        with guarded.client(headers=sent) as client:
            message = client.get("/v1/models").json()["error"]["message"]
        assert ("the same one" in message) is (sent == twice)


def test_errors_do_not_repeat_the_key(guarded):
    with guarded.client(headers={"x-api-key": "my-secret"}) as client:
        assert "my-secret" not in json.dumps(client.get("/v1/models").json())
