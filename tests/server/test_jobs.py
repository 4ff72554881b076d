"""Files and batches through the API: results equal online ones, states are legal."""

import asyncio
import errno
import json
import os
import threading
import time

import pytest
from tests.server.running import bound, running

from ridgeline.core.errors import EngineUnavailableError
from ridgeline.server.generation import BATCH_PRIORITY
from ridgeline.server.jobs import batches, worker
from ridgeline.server.jobs.lines import read_line

LINE = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def batch_file(count, *, url="/v1/completions", **changes):
    lines = [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": url,
            "body": {"prompt": f"the cat {index}", **LINE},
            **changes,
        }
        for index in range(count)
    ]
    return "\n".join(json.dumps(line) for line in lines).encode()


def upload(http, content, *, filename="in.jsonl", purpose="batch"):
    response = http.post(
        "/v1/files", files={"file": (filename, content)}, data={"purpose": purpose}
    )
    assert response.status_code == 200, response.text
    return response.json()


def start(http, content, endpoint="/v1/completions"):
    file = upload(http, content)
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    response = http.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def finished(http, batch_id, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        batch = http.get(f"/v1/batches/{batch_id}").json()
        if batch["status"] in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def lines_of(http, file_id):
    if file_id is None:
        return []
    text = http.get(f"/v1/files/{file_id}/content").text
    return [json.loads(line) for line in text.splitlines()]


async def waits(batch_id):
    await asyncio.sleep(3600)


def test_files_come_back_byte_for_byte(http):
    content = bytes(range(256)) * 1000
    file = upload(http, content, filename="../../etc/ünï.bin", purpose="user_data")
    assert file["bytes"] == len(content)
    assert file["filename"].endswith(".bin")
    assert http.get(f"/v1/files/{file['id']}/content").content == content
    listed = http.get("/v1/files", params={"limit": 1, "purpose": "user_data"}).json()
    assert listed["data"] == [file]
    assert http.delete(f"/v1/files/{file['id']}").json()["deleted"]
    assert http.get(f"/v1/files/{file['id']}").status_code == 404


def test_files_that_expire_are_refused(http):
    form = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    response = http.post("/v1/files", files={"file": ("in.jsonl", b"{}")}, data=form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "expires_after"
    after = {"anchor": "created_at", "seconds": 3600}
    body = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    response = http.post("/v1/batches", json={**body, "output_expires_after": after})
    assert response.status_code == 400
    assert "files do not expire" in response.json()["error"]["message"]


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}])
def test_metadata_has_limits(http, metadata):
    body = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    assert http.post("/v1/batches", json=body | {"metadata": metadata}).status_code == 400
    fits = http.post("/v1/batches", json=body | {"metadata": {"k" * 64: "v" * 512}})
    assert fits.status_code == 404  # that file


def test_a_batch_answers_every_line_as_online(http):
    batch = finished(http, start(http, batch_file(20))["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert batch["error_file_id"] is None
    results = lines_of(http, batch["output_file_id"])
    assert [line["custom_id"] for line in results] == [f"line-{i}" for i in range(20)]
    for index in (0, 19):
        online = http.post("/v1/completions", json={"prompt": f"the cat {index}", **LINE}).json()
        body = results[index]["response"]["body"]
        assert body["choices"] == online["choices"]
        assert body["usage"]["cost"]["decode"] == pytest.approx(
            online["usage"]["cost"]["decode"] / 2
        )


def test_lines_that_fail_are_in_the_error_file(http):
    too_long = json.loads(batch_file(1))
    too_long["custom_id"] = "long"
    too_long["body"]["prompt"] = "the " * 4000
    content = batch_file(2) + b"\n" + json.dumps(too_long).encode()
    batch = finished(http, start(http, content)["id"])
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    (error,) = lines_of(http, batch["error_file_id"])
    assert error["custom_id"] == "long"
    assert error["response"]["status_code"] == 400
    assert len(lines_of(http, batch["output_file_id"])) == 2


@pytest.mark.parametrize(
    ("content", "line", "code"),
    [
        (b"", None, "empty_file"),
        (b"not json", 1, "invalid_json_line"),
        (batch_file(2).replace(b"line-1", b"line-0"), 2, "duplicate_custom_id"),
        (batch_file(1, url="/v1/embeddings"), 1, "invalid_url"),
        (batch_file(1, method="GET"), 1, "invalid_line"),
        (batch_file(2).replace(b"custom_id", b"id", 1), 1, "unknown_field"),
        (b'{"custom_id": "a"}', 1, "missing_required_parameter"),
        (b"[" * 200 + b"\n", 1, "invalid_line"),
        (b"\xff\xfe\n", 1, "invalid_json_line"),
    ],
)
def test_lines_that_are_no_requests_fail_the_batch_before_it_runs(http, content, line, code):
    batch = finished(http, start(http, content)["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["line"] == line
    assert batch["errors"]["data"][0]["code"] == code
    assert batch["output_file_id"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ("text", None),
    ],
)
def test_a_request_that_is_wrong_fails_alone_as_at_openai(http, body, param):
    content = batch_file(2) + b"\n" + batch_file(1, custom_id="wrong", body=body)
    batch = finished(http, start(http, content)["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    (line,) = lines_of(http, batch["error_file_id"])
    assert (line["custom_id"], line["error"]) == ("wrong", None)
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["param"] == param


def test_cancelling_keeps_what_is_done(http):
    batch = start(http, batch_file(3000))
    assert http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 409
    time.sleep(0.3)
    cancelled = http.post(f"/v1/batches/{batch['id']}/cancel").json()
    assert cancelled["status"] in ("cancelling", "cancelled")
    batch = finished(http, batch["id"])
    assert batch["status"] == "cancelled"
    found = lines_of(http, batch["output_file_id"]) + lines_of(http, batch["error_file_id"])
    assert sorted(line["custom_id"] for line in found) == sorted(f"line-{i}" for i in range(3000))
    assert http.post(f"/v1/batches/{batch['id']}/cancel").status_code == 409
    assert http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
def test_other_endpoints(http, endpoint):
    body = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/embeddings": {"input": "hi"},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    }[endpoint]
    line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
    batch = finished(http, start(http, line.encode(), endpoint)["id"])
    (result,) = lines_of(http, batch["output_file_id"])
    assert result["response"]["status_code"] == 200


def test_embeddings_of_a_batch_wait_for_everybody_and_for_the_engine(http, served, monkeypatch):
    """They have the priority of other lines, and are tried again while the engine is away."""
    engine = served.server.engine
    embed, priorities = engine.embed, []

    async def seen(*arguments, **settings):
        priorities.append(settings["priority"])
        if len(priorities) <= 2:
            raise EngineUnavailableError("The engine is starting again.")
        return await embed(*arguments, **settings)

    monkeypatch.setattr(engine, "embed", seen)
    body = {"input": ["hi", "you"]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    batch = finished(http, start(http, json.dumps(line).encode(), line["url"])["id"])
    (result,) = lines_of(http, batch["output_file_id"])
    assert len(result["response"]["body"]["data"]) == 2
    assert set(priorities) == {BATCH_PRIORITY}


def test_lines_that_cannot_be_read_for_a_while_are_run_later(http, served, monkeypatch):
    """No more files may be open: the batch waits; it has not expired, and no slot is lost."""
    failures = iter(range(12))

    def read(*arguments):
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read_line(*arguments)

    monkeypatch.setattr(worker, "read_line", read)
    monkeypatch.setattr(worker, "_DISK_RETRY_S", 0.05)
    batch = finished(http, start(http, batch_file(30))["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert served.worker._slots.num_free == served.server.config.batch_concurrency


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_the_bounds_of_a_page_are_described(http, path):
    described = http.get("/openapi.json").json()["paths"][path]["get"]["parameters"]
    schemas = {each["name"]: each["schema"] for each in described}
    most = schemas["limit"]["maximum"]
    assert http.get(path, params={"limit": most}).status_code == 200
    assert http.get(path, params={"limit": most + 1}).status_code == 400
    assert ("purpose" in schemas) == (path == "/v1/files")


def test_lists_page(http):
    everything = http.get("/v1/batches", params={"limit": 100}).json()["data"]
    seen, after = [], None
    while True:
        page = http.get("/v1/batches", params={"limit": 3, **({"after": after} if after else {})})
        seen += page.json()["data"]
        if not page.json()["has_more"]:
            break
        after = page.json()["last_id"]
    assert [b["id"] for b in seen] == [b["id"] for b in everything]


@pytest.mark.parametrize(
    ("files", "data"),
    [
        ({}, {"purpose": "batch"}),
        ({"file": ("a", b"x")}, {}),
        ({"file": ("a", b"x")}, {"purpose": "fine-tune"}),
        ({"file": ("a", b"x")}, {"purpose": "batch", "other": "1"}),
    ],
)
def test_bad_uploads(http, files, data, served):
    assert http.post("/v1/files", files=files or None, data=data).status_code == 400
    folder = served.server.jobs.files._folder
    assert not list(folder.glob("upload-*"))


def test_a_malformed_upload_is_told_to_its_caller_only(http, caplog):
    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = http.post("/v1/files", content=b"nonsense", headers=headers)
    assert response.status_code == 400
    assert not caplog.records


@pytest.fixture
def keyed(roomy_folder, tmp_path):
    keys = {"api_key": ("a" * 32, "b" * 32), "admin_api_key": "c" * 32}
    with running(roomy_folder, data_dir=tmp_path, **keys) as server:
        yield server


def with_key(server, letter):
    client = server.client()
    client.headers["authorization"] = f"Bearer {letter * 32}"
    return client


def test_files_of_a_key_have_a_total(keyed, monkeypatch):
    server = keyed.server
    bound(monkeypatch, server.jobs, storage_bytes=1 << 20)
    form = {"data": {"purpose": "user_data"}, "files": {"file": ("a", b"x" * 600_000)}}
    with with_key(keyed, "a") as ours, with_key(keyed, "b") as theirs:
        first = upload(ours, b"x" * 600_000, purpose="user_data")
        refused = ours.post("/v1/files", **form)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "file_storage_limit")
        upload(theirs, b"x" * (1 << 20), purpose="user_data")
        assert theirs.post("/v1/files", **form).status_code == 413  # before it is read
        assert ours.delete(f"/v1/files/{first['id']}").json()["deleted"]
        assert ours.post("/v1/files", **form).status_code == 200
        assert len(list(server.jobs.files._folder.iterdir())) == 2


def test_uploads_end_where_there_is_no_room_for_them(keyed, monkeypatch):
    """They were refused once they were on disk: 512 MiB each, whatever the limit."""
    files = keyed.server.jobs.files
    bound(monkeypatch, keyed.server.jobs, storage_bytes=1 << 20)
    sizes, writer = [], files.writer

    class Counted:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def write(self, piece):
            sizes.append(len(piece))
            self._inner.write(piece)

    monkeypatch.setattr(files, "writer", lambda *arguments: Counted(writer(*arguments)))
    form = {"data": {"purpose": "user_data"}, "files": {"file": ("a", b"x" * (4 << 20))}}
    with with_key(keyed, "a") as ours:
        refused = ours.post("/v1/files", **form)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "file_storage_limit")
        assert sum(sizes) <= 1 << 20
        upload(ours, b"x" * (1 << 20), purpose="user_data")  # nothing is left of the first
    assert files._arriving == {}


def refused_line(number):
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": 0}


def test_results_count_before_they_are_files_and_end_the_batch_that_has_no_room(
    http, served, monkeypatch
):
    """11,000 bad lines once took 4 MiB where a key may have one."""
    held = sum(each["bytes"] for each in http.get("/v1/files?limit=10000").json()["data"])
    content = "\n".join(json.dumps(refused_line(number)) for number in range(200)).encode()
    limit = held + len(content) + 20_000
    bound(monkeypatch, served.server.jobs, storage_bytes=limit)
    monkeypatch.setattr(worker, "unanswered", None)  # there is no room for it
    batch = finished(http, start(http, content)["id"])
    assert (batch["status"], batch["output_file_id"]) == ("failed", None)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == ("file_storage_limit", None)
    assert "leaves no room for all results" in error["message"]
    told = lines_of(http, batch["error_file_id"])
    counts = batch["request_counts"]
    assert counts == {"total": 200, "completed": 0, "failed": len(told)}
    assert 0 < len(told) < 200
    assert sum(each["bytes"] for each in http.get("/v1/files?limit=10000").json()["data"]) <= limit
    monkeypatch.undo()
    assert finished(http, start(http, batch_file(2))["id"])["status"] == "completed"


def test_lines_that_are_not_run_are_told_only_where_there_is_room(http, served, monkeypatch):
    monkeypatch.setattr(served.worker, "_carry", waits)
    made = start(http, batch_file(50))
    http.post(f"/v1/batches/{made['id']}/cancel")
    bound(monkeypatch, served.server.jobs, storage_bytes=1)
    served.on_loop(type(served.worker)._carry(served.worker, made["id"]))
    batch = http.get(f"/v1/batches/{made['id']}").json()
    assert (batch["status"], batch["error_file_id"]) == ("cancelled", None)
    assert batch["errors"]["data"][0]["code"] == "file_storage_limit"


def test_what_is_said_of_lines_that_are_not_run_is_made_beside_the_event_loop(
    http, served, monkeypatch
):
    """For 50,000 lines it takes 0.16 s."""
    threads, unanswered = set(), worker.unanswered

    def noted(*arguments):
        threads.add(threading.get_ident())
        return unanswered(*arguments)

    monkeypatch.setattr(worker, "unanswered", noted)
    monkeypatch.setattr(served.worker, "_carry", waits)
    made = start(http, batch_file(3))
    http.post(f"/v1/batches/{made['id']}/cancel")
    served.on_loop(type(served.worker)._carry(served.worker, made["id"]))
    assert len(lines_of(http, finished(http, made["id"])["error_file_id"])) == 3
    loop = served.on_loop(_thread_id())
    assert threads and loop not in threads


async def _thread_id():
    return threading.get_ident()


def test_batches_of_a_key_that_are_not_over_have_a_bound(keyed, monkeypatch):
    monkeypatch.setattr(keyed.worker, "_carry", waits)
    bound(monkeypatch, keyed.server.jobs, batches=2, lines=10)
    with with_key(keyed, "a") as ours, with_key(keyed, "b") as theirs:
        file = upload(ours, batch_file(4))
        body = {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = [ours.post("/v1/batches", json=body | {"input_file_id": file["id"]}) for _ in "ab"]
        assert [each.json()["request_counts"]["total"] for each in made] == [4, 4]
        more = ours.post("/v1/batches", json=body | {"input_file_id": file["id"]})
        assert (more.status_code, more.json()["error"]["code"]) == (429, "batch_limit")
        assert more.headers["retry-after"]
        text = more.json()["error"]["message"]
        assert text.startswith("2 of 2 batches of yours are not over, with 8 of 10 lines")
        long = upload(theirs, batch_file(11))
        for file, status in ((long, 413), (upload(theirs, batch_file(1)), 200)):
            response = theirs.post("/v1/batches", json=body | {"input_file_id": file["id"]})
            assert response.status_code == status
        params = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        requests = [{"custom_id": f"{index}", "params": params} for index in range(10)]
        response = theirs.post("/v1/messages/batches", json={"requests": requests})
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")


def test_of_batches_that_are_over_the_oldest_go(http, monkeypatch):
    monkeypatch.setattr(batches, "MOST_OVER", 3)
    made = [finished(http, start(http, b"not json")["id"])["id"] for _ in range(5)]
    listed = [each["id"] for each in http.get("/v1/batches").json()["data"]]
    assert listed == made[:0:-1]


def test_a_batch_that_waits_for_its_lines_leaves_the_database_alone(monkeypatch):
    groups = []

    class Store:
        async def record(self, lease, results):
            groups.append(results)
            return True

    async def work():
        recorder = worker._Recorder(Store(), None)
        running = asyncio.create_task(recorder.run())
        await asyncio.sleep(0.2)
        assert groups == []
        recorder.put("result")
        recorder.close()
        await running

    monkeypatch.setattr(worker, "_ASK_S", 60)
    asyncio.run(work())
    assert groups == [["result"]]


def test_deleting_a_tenant_removes_what_it_stored_and_nobody_elses(keyed, tmp_path):
    with (
        with_key(keyed, "a") as ours,
        with_key(keyed, "b") as theirs,
        with_key(keyed, "c") as admin,
    ):
        batch = finished(ours, start(ours, batch_file(2))["id"])
        kept = upload(theirs, b"kept", purpose="user_data")
        tenant = tenant_of(keyed, "a")
        assert ours.delete(f"/admin/tenants/{tenant}").status_code == 403
        deleted = admin.delete(f"/admin/tenants/{tenant}").json()
        assert (deleted["files"], deleted["batches"], deleted["deleted"]) == (2, 1, True)
        assert ours.get(f"/v1/batches/{batch['id']}").status_code == 404
        assert ours.get("/v1/files").json()["data"] == []
        assert theirs.get(f"/v1/files/{kept['id']}/content").content == b"kept"
        assert [path.name for path in (tmp_path / "files").iterdir()] == [kept["id"]]


def test_a_tenant_whose_batch_is_not_over_is_not_deleted(keyed, monkeypatch):
    monkeypatch.setattr(keyed.worker, "_carry", waits)
    with with_key(keyed, "a") as ours, with_key(keyed, "c") as admin:
        batch = start(ours, batch_file(1))
        answer = admin.delete(f"/admin/tenants/{tenant_of(keyed, 'a')}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "in_use")
        assert ours.get(f"/v1/batches/{batch['id']}").status_code == 200


def test_deleting_a_tenant_lets_its_kv_be_computed_anew(keyed):
    body = {"prompt": "the cat sat on the mat " * 20, **LINE}
    with with_key(keyed, "a") as ours, with_key(keyed, "c") as admin:

        def cached():
            usage = ours.post("/v1/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert (cached(), cached() > 0) == (0, True)
        admin.delete(f"/admin/tenants/{tenant_of(keyed, 'a')}")
        assert cached() == 0


def tenant_of(server, letter):
    header = {b"authorization": f"Bearer {letter * 32}".encode()}
    return server.server.keys.caller(header).tenant
