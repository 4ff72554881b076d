"""Counting over the last minute."""

import asyncio
import hashlib
import json
import threading
from collections import Counter

import pytest
from tests.server.running import running

from ridgeline.server.errors import ApiError
from ridgeline.server.generation import BATCH_PRIORITY
from ridgeline.server.keys import Caller, KeyLimits
from ridgeline.server.limits import Limits, SlidingCount


def test_a_count_holds_one_minute_and_no_more():
    now = 0.0
    count = SlidingCount(lambda: now)
    for second in range(500):
        now = float(second)
        count.add(2)
        assert len(count._seconds) <= 60
    assert count.total() == 120
    now += 60
    assert count.total() == 0


def test_a_key_without_limits_leaves_nothing_behind_in_a_day():
    now = 0.0
    limits = Limits(1, clock=lambda: now)
    caller = Caller(tenant="local")
    for second in range(0, 86400, 7):
        now = float(second)
        with limits.admitted(caller):
            limits.charge_input(caller, 100)
    tenant = limits._tenants["local"]
    assert max(len(tenant.requests._seconds), len(tenant.inputs._seconds)) <= 60


@pytest.mark.parametrize("start", [100.0, 100.3, 100.7, 100.99])
def test_who_waits_as_long_as_told_gets_in(start):
    """And is told no more than 60 s, beyond which OpenAI's package 2 comes when it likes."""
    now = start
    limits = Limits(9, clock=lambda: now)
    caller = Caller(tenant="a", limits=KeyLimits(requests_per_minute=1))
    with limits.admitted(caller):
        pass
    with pytest.raises(ApiError) as refused, limits.admitted(caller):
        pass
    seconds = int(dict(refused.value.headers)[b"retry-after"])
    assert seconds <= 60
    now += seconds
    with limits.admitted(caller):
        pass


def test_a_prompt_of_a_whole_minute_is_taken_and_one_token_more_never_will_be():
    now = 0.0
    limits = Limits(9, clock=lambda: now)
    caller = Caller(tenant="a", limits=KeyLimits(input_tokens_per_minute=10))
    with pytest.raises(ApiError) as never:
        limits.charge_input(caller, 11)
    assert (never.value.status, dict(never.value.headers).get(b"retry-after")) == (413, None)
    limits.charge_input(caller, 10)
    with pytest.raises(ApiError) as later:
        limits.charge_input(caller, 1)
    assert later.value.status == 429
    now = 60.0
    limits.charge_input(caller, 1)


HI = [{"role": "user", "content": "the cat"}]
WORK = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/embeddings": {"input": "the cat"},
}


@pytest.mark.parametrize("path", WORK)
def test_who_is_over_a_limit_costs_no_work(http, served, monkeypatch, path):
    """Prompts are not rendered or tokenized; and a place that was given is given back."""
    limits = Limits(1)
    monkeypatch.setattr(served.server, "limits", limits)
    assert http.post(path, json=WORK[path]).status_code == 200
    with limits.admitted(Caller(tenant="other")):
        for module in ("answers", "routes.completions"):
            monkeypatch.setattr(f"ridgeline.server.{module}.tokenize", None)
        monkeypatch.setattr("ridgeline.server.routes.pooling.embedding_inputs", None)
        monkeypatch.setattr("ridgeline.server.answers.render", None)
        refused = http.post(path, json=WORK[path])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
    assert http.post(path, json=WORK[path]).status_code == 500
    assert limits.running == 0


KEY, ADMIN = "some-key", "admin-key"
NUM_LINES = 4


@pytest.fixture(scope="module")
def limited(roomy_folder, tmp_path_factory):
    """A server with room for one request; its key may send one beside two files and batches."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "keys.toml").write_text(
        f"""
        [[key]]
        name = "one"
        sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"
        requests_per_minute = 5
        input_tokens_per_minute = 8
        output_tokens_per_minute = 1
        concurrency = 1
        """
    )
    settings = {"api_key_file": str(folder / "keys.toml"), "admin_api_key": ADMIN, "max_queue": 1}
    with running(roomy_folder, data_dir=folder / "data", **settings) as server:
        yield server


def start_batch(client, url):
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": url, "body": WORK[url]}
        for number in range(NUM_LINES)
    ]
    content = "\n".join(map(json.dumps, lines))
    file = client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})
    body = {"input_file_id": file.json()["id"], "endpoint": url, "completion_window": "24h"}
    return client.post("/v1/batches", json=body).json()["id"]


async def counts_of(server, batch_id):
    while (batch := await server.jobs.batches.get("one", batch_id))["status"] != "completed":
        await asyncio.sleep(0.01)
    return batch["request_counts"]


def test_a_batch_takes_nothing_from_its_keys_requests(limited, monkeypatch):
    """Neither places nor requests nor tokens; and what it used is counted nevertheless."""
    engine = limited.server.engine
    generate, may_go, has_begun = engine.generate, threading.Event(), threading.Event()

    async def held(request):
        while request.priority == BATCH_PRIORITY and not may_go.is_set():
            has_begun.set()
            await asyncio.sleep(0.01)
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", held)
    with limited.client(headers={"x-api-key": KEY}) as client:
        batch_ids = [start_batch(client, url) for url in ("/v1/embeddings", "/v1/completions")]
        limited.on_loop(counts_of(limited.server, batch_ids[0]))
        assert has_begun.wait(10)
        online = client.post("/v1/completions", json=WORK["/v1/completions"])
        may_go.set()
        assert online.status_code == 200, online.text
        for batch_id in batch_ids:
            counts = limited.on_loop(counts_of(limited.server, batch_id))
            assert counts["completed"] == NUM_LINES
        assert limited.server.limits.running_lines == 0
        (used,) = client.get("/admin/usage", headers={"x-api-key": ADMIN}).json()["data"]
    assert used["output"] == NUM_LINES + 1


def limits_of(**settings):
    return Limits(99), Caller(tenant="a", limits=KeyLimits(**settings))


def test_a_crowd_that_is_refused_does_not_come_back_as_one():
    limits, caller = Limits(1), Caller(tenant="a", limits=KeyLimits())
    told = Counter()
    with limits.admitted(caller):
        for _ in range(152):
            with pytest.raises(ApiError) as refused, limits.admitted(caller):
                pass
            told[dict(refused.value.headers)[b"retry-after"]] += 1
    assert told == {b"1": 38, b"2": 38, b"3": 38, b"4": 38}


def told_s(refused):
    return int(dict(refused.value.headers)[b"retry-after"])


def test_who_is_over_a_limit_waits_until_enough_has_left_the_minute():
    now = 0.0
    limits = Limits(9, clock=lambda: now)
    caller = Caller(tenant="a", limits=KeyLimits(input_tokens_per_minute=10))
    limits.charge_input(caller, 4)
    now = 20.0
    limits.charge_input(caller, 5)
    limits.charge_input(caller, 1)
    for now, num_tokens, wait_s in (
        (30.0, 1, 30), (30.0, 4, 30), (30.0, 5, 50), (30.0, 10, 50), (59.5, 1, 1), (60.0, 5, 20),
    ):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            limits.charge_input(caller, num_tokens)
        assert told_s(refused) == wait_s, (now, num_tokens)
    limits.charge_input(caller, 4)


def test_a_full_server_takes_one_more_when_one_has_ended():
    limits, caller = Limits(2), Caller(tenant="a")
    with limits.admitted(caller), limits.waiting(caller):
        for enter in (limits.admitted, limits.waiting):
            with pytest.raises(ApiError) as refused, enter(caller):
                pass
            assert refused.value.status == 429
        with limits.admitted_line():
            assert (limits.running, limits.running_lines) == (2, 1)
    assert (limits.running, limits.running_lines) == (0, 0)
    with limits.admitted(caller, num_outputs=5):
        assert limits.running == 1


def test_who_waits_takes_the_place_of_one_output():
    limits, caller = limits_of(concurrency=2)
    with (
        limits.waiting(caller),
        limits.waiting(caller),
        pytest.raises(ApiError, match="2 outputs at once"),
    ):
        limits.waiting(caller).__enter__()
    with limits.admitted(caller, num_outputs=2):
        pass


def test_requests_that_are_refused_are_not_counted_and_those_of_others_neither():
    limits, caller = limits_of(requests_per_minute=2)
    limits.count_request(caller)
    limits.count_request(Caller(tenant="b"))
    limits.count_request(caller)
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            limits.count_request(caller)
        assert refused.value.status == 429
    assert limits._tenants["a"].requests.total() == 2


def test_each_output_counts_towards_concurrency():
    limits, caller = limits_of(concurrency=4)
    with limits.admitted(caller, num_outputs=3):
        with pytest.raises(ApiError, match="4 outputs at once") as refused:
            limits.admitted(caller, num_outputs=2).__enter__()
        assert refused.value.status == 429
        with limits.admitted(caller, num_outputs=1):
            pass
    with pytest.raises(ApiError, match="asks for 5 outputs") as refused:
        limits.admitted(caller, num_outputs=5).__enter__()
    assert refused.value.status == 400
    with limits.admitted(caller, num_outputs=4):
        pass


def test_output_tokens_are_reserved_and_what_was_not_made_is_given_back():
    limits, caller = limits_of(output_tokens_per_minute=100)
    with limits.admitted(caller, output_tokens=60) as first:
        with pytest.raises(ApiError, match="100 output tokens a minute"):
            limits.admitted(caller, output_tokens=60).__enter__()
        with limits.admitted(caller, output_tokens=40):
            pass
        limits.charge_output(caller, 10, first)
        assert first.left == 50
    with limits.admitted(caller, output_tokens=90):
        pass
    with pytest.raises(ApiError), limits.admitted(caller, output_tokens=91):
        pass


def test_a_key_without_limits_reserves_nothing_of_its_tenants_others():
    limits = Limits(9)
    limited = Caller(tenant="a", limits=KeyLimits(output_tokens_per_minute=100))
    with (
        limits.admitted(Caller(tenant="a"), output_tokens=1000),
        limits.admitted(limited, output_tokens=100),
    ):
        pass


def test_a_request_for_more_than_a_minutes_output_takes_all_of_it():
    limits, caller = limits_of(output_tokens_per_minute=100)
    with limits.admitted(caller, output_tokens=100_000) as reservation:
        assert reservation.left == 100
        with pytest.raises(ApiError):
            limits.admitted(caller, output_tokens=1).__enter__()
        limits.charge_output(caller, 150, reservation)
    with pytest.raises(ApiError):
        limits.admitted(caller, output_tokens=1).__enter__()


MANY = {
    "/v1/completions": [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}, {"prompt": [[5], [6]]}],
    "/v1/chat/completions": [{"messages": HI, "n": 2}],
    "/v1/embeddings": [{"input": ["a", "b"]}],
}


@pytest.fixture
def with_limits(served, monkeypatch):
    """Gives every caller these limits."""

    def limit(**settings):
        caller = Caller(tenant="limited", limits=KeyLimits(**settings))
        monkeypatch.setattr(served.server.keys, "caller", lambda _: caller)
        monkeypatch.setattr(served.server, "limits", Limits(99))
        return served.server.limits, caller

    return limit


@pytest.mark.parametrize(("path", "body"), [(p, b) for p, many in MANY.items() for b in many])
def test_lists_and_samples_are_outputs_at_once(http, with_limits, path, body):
    limits, caller = with_limits(concurrency=1)
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert "asks for 2 outputs" in response.json()["error"]["message"]
    limits, caller = with_limits(concurrency=2)
    with limits.admitted(caller):
        assert http.post(path, json=body).status_code == 429
    more = {} if path == "/v1/embeddings" else {"max_tokens": 1}
    assert http.post(path, json={**body, **more}).status_code == 200


@pytest.mark.parametrize("path", [path for path in WORK if path != "/v1/embeddings"])
def test_every_route_reserves_its_output(http, with_limits, path):
    limits, caller = with_limits(output_tokens_per_minute=50)
    with limits.admitted(caller, output_tokens=50):
        assert http.post(path, json=WORK[path]).status_code == 429
    assert http.post(path, json=WORK[path]).status_code == 200
    assert limits._tenants["limited"].reserved == 0
    assert limits._tenants["limited"].outputs.total() == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/tokenizer_info", None),
        ("POST", "/v1/messages/count_tokens", {"messages": HI}),
        ("POST", "/v1/files", None),
        ("GET", "/v1/files", None),
        ("GET", "/v1/files/none", None),
        ("GET", "/v1/files/none/content", None),
        ("DELETE", "/v1/files/none", None),
        ("POST", "/v1/batches", {}),
        ("GET", "/v1/batches", None),
        ("GET", "/v1/batches/none", None),
        ("POST", "/v1/batches/none/cancel", None),
    ],
)
def test_what_runs_no_model_counts_as_a_request_too(http, with_limits, method, path, body):
    with_limits(requests_per_minute=1)
    assert http.request(method, path, json=body).status_code != 429
    refused = http.request(method, path, json=body)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
