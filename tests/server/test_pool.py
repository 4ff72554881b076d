"""Several models in one server: each loaded for those who ask for it, in a process of its own."""

import asyncio
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.server.running import running_pool

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.server.config import ServerConfig
from ridgeline.server.pool.plan import pool_plan
from ridgeline.server.pool.pool import ModelPool

MIB = 1 << 20
BUDGET = 260 * MIB  # two of these models, and never three
ADMIN = {"Authorization": "Bearer admin"}
USER = {"Authorization": "Bearer user"}
ENGINE = {"kv_cache_memory_bytes": 2 * MIB, "block_tokens": 16}  # of the cpu executor


@pytest.fixture(scope="module")
def pool(model_folder, damaged_folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model_folder, other)
    big = tmp_path_factory.mktemp("big") / "model"
    shutil.copytree(model_folder, big)
    config = json.loads((big / "config.json").read_text())
    (big / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 20}))
    words = [
        "embedded",
        f"a={model_folder}",
        f"b={other}",
        f"broken={damaged_folder}",
        f"big={big}",
    ]
    with running_pool(
        words,
        data_dir=tmp_path_factory.mktemp("data"),
        engine=ENGINE,
        memory_bytes=BUDGET,
        api_key=("user",),
        admin_api_key="admin",
    ) as server:
        yield server


@pytest.fixture
def http(pool):
    with pool.client(headers=USER) as client:
        yield client


def models(http):
    return {card["id"]: card for card in http.get("/v1/models").json()["data"]}


def loaded(http):
    return {name for name, card in models(http).items() if card["state"] == "loaded"}


def complete(http, model, **fields):
    body = {"model": model, "prompt": [65, 66], "max_tokens": 4, "temperature": 0, **fields}
    return http.post("/v1/completions", json=body)


def test_a_model_is_loaded_when_it_is_asked_for_and_another_makes_room(pool, http):
    assert loaded(http) == set()
    assert http.get("/ready").status_code == 200
    first, again = (complete(http, "a", return_token_ids=True).json() for _ in range(2))
    assert first["model"] == "a"
    assert first["choices"] == again["choices"]
    assert complete(http, "b", return_token_ids=True).json()["choices"] == first["choices"]
    assert loaded(http) == {"a", "b"}
    processes = [model.engine.worker_pid for model in pool.server.pool.models]
    assert complete(http, "embedded").json()["model"] == "embedded"
    assert len(loaded(http)) == 2
    gone = {"a", "b"} - loaded(http)
    assert len(gone) == 1
    number = [model.name for model in pool.server.pool.models].index(gone.pop())
    assert not psutil.pid_exists(processes[number])
    taken = sum(card["memory_bytes"] for card in models(http).values() if card["state"] == "loaded")
    assert taken <= BUDGET


def test_requests_for_more_models_than_fit_are_all_answered(pool, http):
    names = ["a", "b", "embedded"] * 4
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda name: complete(http, name).json()["model"], names))
    assert answers == names
    resident = sum(
        psutil.Process(model.engine.worker_pid).memory_info().rss
        for model in pool.server.pool.models
        if model.state == "loaded"
    )
    assert resident <= 1.02 * BUDGET


def test_every_interface_picks_the_model_by_its_name(http):
    chat = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"model": "embedded", "input": "Hi", "max_output_tokens": 4}),
        ("/v1/embeddings", {"model": "embedded", "input": "Hi"}),
        ("/api/chat", {**chat, "stream": False} | {"model": "embedded:latest"}),
        ("/completion", {"model": "embedded", "prompt": "Hi", "n_predict": 4}),
        ("/tokenize", {"model": "embedded", "prompt": "Hi"}),
    ):
        body = {
            key: value for key, value in body.items() if path != "/api/chat" or key != "max_tokens"
        }
        answer = http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", "embedded").removesuffix(":latest") == "embedded"
    assert http.get("/props", params={"model": "embedded"}).json()["model_alias"] == "embedded"
    with http.stream("POST", "/v1/completions", json={
        "model": "embedded", "prompt": "Hi", "max_tokens": 4, "stream": True
    }) as stream:  # fmt: skip
        assert "[DONE]" in "".join(stream.iter_text())


def test_the_lines_of_a_batch_pick_theirs(http):
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions",
         "body": {"model": name, "prompt": [65], "max_tokens": 2}}
        for name in ("a", "embedded")
    ]  # fmt: skip
    text = "\n".join(json.dumps(line) for line in lines).encode()
    files = {"file": ("in.jsonl", text)}
    file = http.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=wanted).json()["id"]
    for _ in range(600):
        state = http.get(f"/v1/batches/{batch}").json()
        if state["status"] == "completed":
            break
        time.sleep(0.05)
    out = http.get(f"/v1/files/{state['output_file_id']}/content").text.splitlines()
    found = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, out)}
    assert found == {"a": "a", "embedded": "embedded"}


def test_what_can_never_fit_is_refused_at_once(http):
    started_s = time.monotonic()
    answer = complete(http, "big")
    assert time.monotonic() - started_s < 0.1
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "model_does_not_fit"
    assert complete(http, "nobody").status_code == 404


def test_a_model_that_cannot_be_loaded_fails_those_who_wait_for_it_alone(http):
    assert complete(http, "a").status_code == 200
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda name: complete(http, name), ["broken", "a", "broken", "a"])
        )
    assert [answer.status_code for answer in answers] == [503, 200, 503, 200]
    assert answers[0].json()["error"]["code"] == "model_not_loaded"
    assert "token" in models(http)["broken"]["failure"]


def test_an_engine_that_dies_harms_its_own_requests_alone(pool, http):
    with ThreadPoolExecutor(2) as threads:
        assert complete(http, "a").status_code == complete(http, "embedded").status_code == 200
        engine = next(m.engine for m in pool.server.pool.models if m.name == "a")
        long = {"max_tokens": 250, "ignore_eos": True, "temperature": 1}
        other = threads.submit(complete, http, "embedded", **long)
        os.kill(engine.worker_pid, signal.SIGKILL)
        assert other.result().json()["usage"]["completion_tokens"] == 250
    for _ in range(100):
        if complete(http, "a").status_code == 200:
            break
        time.sleep(0.1)
    assert complete(http, "a").status_code == 200


def test_the_admin_and_ollama_load_and_unload(http):
    for verb in ("load", "unload"):
        assert http.post(f"/admin/models/{verb}", json={"model": "a"}).status_code == 403
    card = http.post("/admin/models/load", json={"model": "a"}, headers=ADMIN).json()
    assert (card["id"], card["state"]) == ("a", "loaded")
    shown = {each["name"]: each for each in http.get("/api/ps").json()["models"]}
    assert shown["a:latest"]["size"] == card["memory_bytes"]
    assert len(http.get("/api/tags").json()["models"]) == 5
    card = http.post("/admin/models/unload", json={"model": "a"}, headers=ADMIN).json()
    assert card["state"] == "unloaded"
    gone = http.post("/api/generate", json={"model": "embedded", "keep_alive": 0, "stream": False})
    assert gone.json()["done_reason"] == "unload"
    assert "embedded" not in loaded(http)
    wrong = http.post("/api/generate", json={"model": "b", "keep_alive": "soon"})
    assert wrong.status_code == 400


def test_a_model_is_kept_for_as_long_as_was_asked_for(http):
    kept = http.post("/api/generate", json={"model": "b", "keep_alive": "200ms", "stream": False})
    assert kept.json()["done_reason"] == "load"
    deadline_s = time.monotonic() + 10
    while "b" in loaded(http):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_metrics_tell_the_models_apart(http):
    text = http.get("/metrics", headers=ADMIN).text
    for name in ("a", "embedded"):
        assert f'ridgeline:generation_tokens_total{{model_name="{name}"}}' in text
        assert f'ridgeline:e2e_request_latency_seconds_count{{model_name="{name}"}}' in text
    assert 'ridgeline:model_loads_total{model_name="b"}' in text
    assert text.count("# TYPE ridgeline:num_requests_running ") == 1


def test_a_budget_in_which_nothing_fits_is_refused_at_the_start():
    plan = pool_plan(EngineConfig(**ENGINE), ["embedded"], ServerConfig(), memory_bytes=1 << 10)
    with pytest.raises(SettingsError, match="No model fits: the smallest needs"):
        asyncio.run(ModelPool(plan.config).start(plan.models))


def test_who_waits_for_a_model_counts_as_in_progress(pool, http, monkeypatch):
    """Else their bodies would fill the memory while a model is loaded."""
    assert http.post("/api/generate", json={"model": "a", "keep_alive": 0}).status_code == 200
    monkeypatch.setattr(pool.server.limits, "_max_queue", 3)
    model = next(model for model in pool.server.pool.models if model.name == "a")
    most = 0
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(complete, http, "a") for _ in range(12)]
        while not all(each.done() for each in asked):
            most = max(most, len(model.waiters))
            time.sleep(0.001)
        answers = [each.result() for each in asked]
    assert most == 3
    refused = next(each for each in answers if each.status_code == 429)
    assert sum(each.status_code == 200 for each in answers) == 3
    assert refused.json()["error"]["code"] == "server_overloaded"
    assert "retry-after" in refused.headers
    assert pool.server.limits.running == 0
