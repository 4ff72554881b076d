"""``/v1/messages/batches``: batches of messages as Anthropic's clients know them."""

import asyncio
import json
import time

import pytest
from tests.server.running import bound, running

BATCHES = "/v1/messages/batches"
PARAMS = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3, "temperature": 0}


def create(http, *params):
    requests = [{"custom_id": f"line-{i}", "params": each} for i, each in enumerate(params)]
    response = http.post(BATCHES, json={"requests": requests})
    assert response.status_code == 200, response.text
    return response.json()


def ended(http, batch_id):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        batch = http.get(f"{BATCHES}/{batch_id}").json()
        if batch["processing_status"] == "ended":
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def results(http, batch):
    lines = http.get(batch["results_url"]).text.splitlines()
    return {each["custom_id"]: each["result"] for each in map(json.loads, lines)}


async def waits(batch_id):
    await asyncio.sleep(3600)


def counts(**some):
    return dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0) | some


def test_each_message_is_answered_as_online_or_has_its_error(http):
    online = http.post("/v1/messages", json=PARAMS).json()
    made = create(http, PARAMS, PARAMS | {"temperature": -1}, PARAMS | {"stream": True})
    assert made["id"].startswith("msgbatch_")
    assert made["request_counts"] == counts(processing=3)
    batch = ended(http, made["id"])
    assert batch["request_counts"] == counts(succeeded=1, errored=2)
    assert batch["ended_at"] >= batch["created_at"]
    assert batch["cancel_initiated_at"] is None
    found = results(http, batch)
    assert found["line-0"]["type"] == "succeeded"
    assert found["line-0"]["message"]["content"] == online["content"]
    assert found["line-1"]["type"] == found["line-2"]["type"] == "errored"
    assert found["line-1"]["error"]["error"]["type"] == "invalid_request_error"
    assert "stream" in found["line-2"]["error"]["error"]["message"]


def test_a_batch_that_is_cancelled_says_so_of_each_message(http, served, monkeypatch):
    carry = served.worker._carry
    monkeypatch.setattr(served.worker, "_carry", waits)
    made = create(http, PARAMS, PARAMS)
    path = f"{BATCHES}/{made['id']}"
    for response in (http.get(f"{path}/results"), http.delete(path)):
        assert (response.status_code, response.json()["type"]) == (409, "error")
    cancelled = http.post(f"{path}/cancel").json()
    assert cancelled["processing_status"] == "canceling"
    assert cancelled["cancel_initiated_at"]
    served.on_loop(carry(made["id"]))
    batch = ended(http, made["id"])
    assert batch["request_counts"] == counts(canceled=2)
    assert results(http, batch) == {each: {"type": "canceled"} for each in ("line-0", "line-1")}


def test_a_deleted_batch_leaves_no_files(http, served):
    files = list(served.server.jobs.files._folder.iterdir())
    made = ended(http, create(http, PARAMS)["id"])
    deleted = http.delete(f"{BATCHES}/{made['id']}").json()
    assert deleted == {"id": made["id"], "type": "message_batch_deleted"}
    assert http.get(f"{BATCHES}/{made['id']}").status_code == 404
    assert list(served.server.jobs.files._folder.iterdir()) == files


def test_pages_go_both_ways_and_have_no_other_batches(http):
    ids = [create(http, PARAMS)["id"] for _ in range(3)][::-1]

    def page(**query):
        found = http.get(BATCHES, params=query).json()
        return [each["id"] for each in found["data"]], found["has_more"]

    assert page(limit=2) == (ids[:2], True)
    assert page(limit=1, after_id=ids[0]) == (ids[1:2], True)
    assert page(limit=1, before_id=ids[2]) == (ids[1:2], True)
    assert page(limit=2, before_id=ids[2]) == (ids[:2], False)
    assert http.get(BATCHES, params={"before_id": "a", "after_id": "b"}).status_code == 400
    openai = {each["id"] for each in http.get("/v1/batches").json()["data"]}
    assert set(ids) <= openai
    for each in ids:
        ended(http, each)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([{"custom_id": "", "params": {}}], "custom_id: this must be 1 to 64 letters of a to z"),
        ([], "requests"),
        ([{"custom_id": "a b", "params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a", "params": {}}] * 2, "requests[1]: custom_id is there twice"),
        ([{"custom_id": "a", "body": {}}], "requests[0].body"),
    ],
)
def test_a_list_that_is_none_of_requests_is_refused(http, requests, words):
    response = http.post(BATCHES, json={"requests": requests})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_messages_may_stand_on_several_lines(http):
    body = json.dumps({"requests": [{"custom_id": "a", "params": PARAMS}]}, indent=2)
    batch = ended(http, http.post(BATCHES, content=body).json()["id"])
    assert batch["request_counts"]["succeeded"] == 1


def test_messages_count_towards_the_storage_of_files(http, served, monkeypatch):
    bound(monkeypatch, served.server.jobs, storage_bytes=1 << 20)
    params = PARAMS | {"system": "x" * (1 << 20)}
    held = [len(http.get(path).json()["data"]) for path in (BATCHES, "/v1/files")]
    response = http.post(BATCHES, json={"requests": [{"custom_id": "a", "params": params}]})
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    assert [len(http.get(path).json()["data"]) for path in (BATCHES, "/v1/files")] == held


def test_each_key_has_its_own_and_they_survive_the_server(roomy_folder, tmp_path, monkeypatch):
    settings = {"data_dir": tmp_path, "api_key": ("a" * 32, "b" * 32)}
    with running(roomy_folder, **settings) as server, server.client() as ours:
        monkeypatch.setattr(server.worker, "_carry", waits)
        ours.headers["x-api-key"] = "a" * 32
        made = create(ours, PARAMS)
    with (
        running(roomy_folder, **settings) as server,
        server.client() as ours,
        server.client() as theirs,
    ):
        ours.headers["x-api-key"], theirs.headers["x-api-key"] = "a" * 32, "b" * 32
        batch = ended(ours, made["id"])
        assert batch["request_counts"] == counts(succeeded=1)
        assert theirs.get(BATCHES).json()["data"] == []
        path = f"{BATCHES}/{made['id']}"
        for response in (
            theirs.get(path),
            theirs.get(f"{path}/results"),
            theirs.post(f"{path}/cancel"),
            theirs.delete(path),
        ):
            assert response.status_code == 404
        assert results(ours, batch)["line-0"]["type"] == "succeeded"


def test_a_list_goes_on_from_what_there_is(http):
    made = create(http, PARAMS)
    for path in (f"{BATCHES}?after_id=", "/v1/batches?after=", "/v1/files?after=&purpose="):
        assert len(http.get(path).json()["data"]) > 0  # as if nothing were said
    for path in (f"{BATCHES}?after_id=msgbatch_0", "/v1/batches?after=0", "/v1/files?after=0"):
        response = http.get(path)
        assert response.status_code == 400
        assert "go on from" in response.text
    ended(http, made["id"])


def test_an_id_of_ones_own_has_one_line(http):
    response = http.post(BATCHES, json={"requests": [{"custom_id": "a\n", "params": PARAMS}]})
    assert response.status_code == 400


def test_results_of_which_a_file_is_gone_are_no_empty_success(http):
    batch = ended(http, create(http, PARAMS | {"temperature": -1})["id"])
    (file,) = [each for each in http.get("/v1/files?limit=100").json()["data"]
               if each["purpose"] == "batch_output"][:1]  # fmt: skip
    assert http.delete(f"/v1/files/{file['id']}").status_code == 200
    response = http.get(batch["results_url"])
    assert (response.status_code, "was deleted" in response.text) == (404, True)


def test_a_batch_without_room_for_all_results_tells_of_each_message(http, served, monkeypatch):
    held = sum(each["bytes"] for each in http.get("/v1/files?limit=10000").json()["data"])
    bound(monkeypatch, served.server.jobs, storage_bytes=held + 20_000)
    batch = ended(http, create(http, *[{"messages": 0}] * 100)["id"])
    assert batch["request_counts"] == counts(errored=100)
    found = results(http, batch)
    assert set(found) == {f"line-{i}" for i in range(100)}
    assert {each["type"] for each in found.values()} == {"errored"}
    errors = [each["error"]["error"] for each in found.values()]
    kinds = {each["type"]: each["message"] for each in errors}
    assert set(kinds) == {"invalid_request_error", "request_too_large"}
    assert "no room" in kinds["request_too_large"]


def test_a_batch_whose_results_are_deleted_is_archived(http):
    batch = ended(http, create(http, PARAMS)["id"])
    assert batch["archived_at"] is None
    files = http.get("/v1/batches/" + batch["id"]).json()
    assert "archived_at" not in files
    http.delete("/v1/files/" + files["input_file_id"])
    assert http.get(f"{BATCHES}/{batch['id']}").json()["archived_at"] is None
    http.delete("/v1/files/" + files["output_file_id"])
    assert http.get(f"{BATCHES}/{batch['id']}").json()["archived_at"] >= batch["ended_at"]


def test_a_cursor_that_is_none_is_named(http):
    for path, param in (("/v1/batches?after=0", "after"), ("/v1/files?after=0", "after")):
        assert http.get(path).json()["error"]["param"] == param
    for name in ("after_id", "before_id"):
        error = http.get(f"{BATCHES}?{name}=msgbatch_0").json()["error"]
        assert error["message"].startswith(f"{name}: ")
