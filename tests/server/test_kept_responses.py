"""`previous_response_id`: each key goes on from its own responses, for a time."""

import asyncio
import json
import os
import sqlite3
import time
from contextlib import contextmanager, suppress

import pytest
from tests.server.running import running

from ridgeline.server.errors import ApiError
from ridgeline.server.jobs import responses
from ridgeline.server.jobs.database import Database
from ridgeline.server.jobs.jobs import Jobs


@pytest.fixture(scope="module")
def keeping(roomy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    key = folder / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    settings = {"api_key": ("one", "two"), "admin_api_key": "admin", "keep_responses_s": 60}
    with running(
        roomy_folder, data_dir=folder / "jobs", encryption_key_file=str(key), **settings
    ) as server:
        server.folder = folder / "jobs"
        yield server


@pytest.fixture
def client(keeping):
    with keeping.client(headers={"authorization": "Bearer one"}) as client:
        yield client


def ask(client, text, **fields):
    body = {"input": text, "max_output_tokens": 6, "temperature": 0, **fields}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(response):
    return response["output"][0]["content"][0]["text"]


def test_a_response_goes_on_from_an_earlier_one(client):
    first = ask(client, "the cat")
    assert first["store"] is True
    second = ask(client, "the mat", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    whole = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "the mat"},
    ]
    assert text_of(second) == text_of(ask(client, whole, store=False))
    third = ask(client, "sat", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_a_stream_is_kept(client):
    with client.stream(
        "POST", "/v1/responses", json={"input": "the cat", "max_output_tokens": 4, "stream": True}
    ) as stream:
        last = [line for line in stream.iter_lines() if line.startswith("data: ")][-1]
    made = json.loads(last.removeprefix("data: "))["response"]
    assert client.get(f"/v1/responses/{made['id']}").json() == made


def test_it_is_read_and_forgotten(client):
    made = ask(client, "the cat")
    assert client.get(f"/v1/responses/{made['id']}").json() == made
    assert client.delete(f"/v1/responses/{made['id']}").json()["deleted"] is True
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404
    assert client.delete(f"/v1/responses/{made['id']}").status_code == 404


def test_what_is_not_to_be_stored_is_not(client):
    made = ask(client, "the cat", store=False)
    assert made["store"] is False
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_no_key_finds_anothers(client, keeping):
    made = ask(client, "the cat")
    with keeping.client(headers={"authorization": "Bearer two"}) as other:
        assert other.get(f"/v1/responses/{made['id']}").status_code == 404
        assert other.delete(f"/v1/responses/{made['id']}").status_code == 404
        body = {"input": "a", "previous_response_id": made["id"]}
        refused = other.post("/v1/responses", json=body)
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "previous_response_id"
    assert client.get(f"/v1/responses/{made['id']}").status_code == 200


def test_it_ends_with_its_time(client, monkeypatch):
    made = ask(client, "the cat")
    pass_a_minute(monkeypatch)
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_its_text_is_encrypted_and_goes_with_the_tenant(client, keeping):
    made = ask(client, "zebrawood and the cat")
    content = b"".join(path.read_bytes() for path in keeping.folder.glob("jobs.sqlite*"))
    assert made["id"].encode() in content
    assert b"zebrawood" not in content
    with keeping.client(headers={"authorization": "Bearer admin"}) as admin:
        tenant = _tenant(keeping, made["id"])
        assert admin.delete(f"/admin/tenants/{tenant}").json()["deleted"] is True
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def _tenant(keeping, response_id):
    with sqlite3.connect(f"file:{keeping.folder}/jobs.sqlite?mode=ro", uri=True) as db:
        query = "SELECT tenant FROM responses WHERE id = ?"
        return db.execute(query, (response_id,)).fetchone()[0]


def test_a_server_that_keeps_none_says_so(http):
    answer = http.post("/v1/responses", json={"input": "a", "previous_response_id": "resp_1"})
    assert answer.status_code == 400
    assert "--keep-responses-s" in answer.json()["error"]["message"]
    absent = http.get("/v1/responses/resp_1")
    assert absent.status_code == 404
    assert "--keep-responses-s" in absent.json()["error"]["message"]


def pass_a_minute(monkeypatch):
    day_s, by_id = time.time() + 61, time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: day_s)
    monkeypatch.setattr(time, "clock_gettime", lambda which: by_id(which) + 61)


def kept(number, text="x"):
    return responses.KeptResponse(response={"id": f"resp_{number}", "text": text}, items=[])


@contextmanager
def store(folder):
    jobs = Jobs(Database(folder))
    try:
        yield jobs.responses
    finally:
        jobs.close()


def on_disk(folder):
    return b"".join(path.read_bytes() for path in folder.glob("jobs.sqlite*"))


async def there(found, tenant, numbers):
    """Which of a tenant's are found."""
    gotten = []
    for number in numbers:
        with suppress(ApiError):
            await found.get(tenant, f"resp_{number}")
            gotten.append(number)
    return gotten


def test_what_has_expired_is_erased_without_another_request(tmp_path, monkeypatch):
    """Once only the next response that was kept deleted it, and the log of changes had it on."""

    async def fill():
        with store(tmp_path) as found:
            await found.put("a", kept(1, "zebrawood" * 1000), ttl_s=60)
            await found.put("a", kept(2, "mahogany"), ttl_s=600)
            assert b"zebrawood" in on_disk(tmp_path)

    async def look():
        with store(tmp_path) as found:
            purging = asyncio.create_task(found.keep_purging())
            for _ in range(100):
                await asyncio.sleep(0.02)
                if b"zebrawood" not in on_disk(tmp_path):
                    break
            purging.cancel()
            assert b"zebrawood" not in on_disk(tmp_path)
            assert await there(found, "a", (1, 2)) == [2]
            await found.put("a", kept(3, "zebrawood" * 1000), ttl_s=60)
            monkeypatch.setattr(responses, "MAX_KEPT", 1)
            await found.put("a", kept(4), ttl_s=60)
            await found.purge()
            assert b"zebrawood" not in on_disk(tmp_path)
            assert b"mahogany" not in on_disk(tmp_path)

    asyncio.run(fill())
    pass_a_minute(monkeypatch)
    asyncio.run(look())


def test_bytes_are_limited_for_each_tenant_and_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "MAX_TENANT_BYTES", 5000)
    monkeypatch.setattr(responses, "MAX_BYTES", 8000)
    text = "x" * 900

    async def fill():
        with store(tmp_path) as found:
            for number in range(8):
                await found.put("a", kept(number, text), ttl_s=60)
            assert await there(found, "a", range(8)) == [3, 4, 5, 6, 7]
            with pytest.raises(ApiError, match="are kept; send store: false") as refused:
                await found.put("a", kept(8, "x" * 6000), ttl_s=60)
            assert refused.value.status == 413
        with store(tmp_path) as found:  # what there was counts again
            for number in range(10, 14):
                await found.put("b", kept(number, text), ttl_s=60)
            assert await there(found, "a", range(8)) == [4, 5, 6, 7]  # it had more than b
            assert await there(found, "b", range(10, 14)) == [10, 11, 12, 13]
            await found.delete("a", "resp_4")
            await found.put("b", kept(14, text), ttl_s=60)
            assert await there(found, "a", range(8)) == [5, 6, 7]
            assert await there(found, "b", range(10, 15)) == [10, 11, 12, 13, 14]

    asyncio.run(fill())


def test_what_a_response_was_made_from_is_listed(client):
    first = ask(client, "the cat")
    second = ask(client, [{"role": "user", "content": "the mat"}], previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    items = client.get(path, params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert items[0]["content"] == [{"type": "input_text", "text": "the cat"}]
    page = client.get(path, params={"limit": 1, "after": items[2]["id"]}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([items[1]["id"]], True)
    for query in ({"order": "up"}, {"after": "x"}):
        assert client.get(path, params=query).status_code == 400
    assert client.get("/v1/responses/resp_1/input_items").status_code == 404


def test_tokens_of_an_input_are_counted(client):
    first = ask(client, "the cat")
    goes_on = {"previous_response_id": first["id"]}
    path = "/v1/responses/input_tokens"
    counted = client.post(path, json={"input": "the mat", **goes_on}).json()["input_tokens"]
    assert counted == ask(client, "the mat", **goes_on)["usage"]["input_tokens"]
