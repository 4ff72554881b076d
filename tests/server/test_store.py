"""A data folder that is damaged, full, or open to others."""

import asyncio
import errno
import io
import json
import os
import random
import shutil
import stat
import threading
import time
from contextlib import suppress

import pytest
from tests.server.running import running
from tests.server.test_jobs import batch_file, finished, lines_of, start

from ridgeline.core.errors import DiskError, RidgelineError
from ridgeline.server.errors import ApiError
from ridgeline.server.ids import new_id
from ridgeline.server.jobs import worker
from ridgeline.server.jobs.database import Database
from ridgeline.server.jobs.files import FileStore
from ridgeline.server.jobs.jobs import Jobs


def make(folder):
    database = Database(folder)
    FileStore(database)
    database.close()
    return folder / "jobs.sqlite"


def garble(path, start, end):
    content = bytearray(path.read_bytes())
    content[start:end] = os.urandom(len(content[start:end]))
    path.write_bytes(content)


@pytest.mark.parametrize(("start", "end"), [(0, 16), (0, 10**6), (16, 100), (100, 10**6)])
def test_a_damaged_database_is_told_at_the_start(tmp_path, start, end):
    garble(make(tmp_path), start, end)
    for _ in range(2):  # nor is the folder still locked
        with pytest.raises(DiskError, match=r"jobs\.sqlite") as told:
            make(tmp_path)
        assert str(told.value).count(". ") == 0


def damaged(content, rng):
    """Bytes changed, an end cut off, a stretch of zeros, or a page in another's place."""
    content, start = bytearray(content), rng.randrange(len(content))
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randrange(1, 40)):
                content[rng.randrange(len(content))] = rng.randrange(256)
        case 1:
            del content[start:]
        case 2:
            stop = min(start + rng.randrange(1, 5000), len(content))
            content[start:stop] = bytes(stop - start)
        case 3:
            start, other = (rng.randrange(len(content) // 4096) * 4096 for _ in range(2))
            content[start : start + 4096] = content[other : other + 4096]
    return bytes(content)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_damage_to_the_database_costs_a_file(tmp_path, count):
    """Files without a row are removed at the start: in 16 of 250 cases some that had one were."""
    whole, ids = tmp_path / "whole", []
    jobs = Jobs(Database(whole))

    async def fill():
        for number in range(60):
            ids.append(new_id("file-"))
            jobs.files.temporary(ids[-1]).write_bytes(b"x")
            await jobs.files.adopt(ids[-1], "a", f"name {number}", "batch", 1)
            await jobs.batches.create(
                "a",
                endpoint="/v1/completions",
                input_file=ids[-1],
                window="24h",
                window_s=86_400,
                metadata={"number": str(number)},
            )

    async def read(jobs):
        for each in ids:
            with suppress(ApiError):
                await jobs.files.get("a", each)
        with suppress(ApiError):
            await jobs.batches.list("a", after=None, limit=100)

    asyncio.run(fill())
    jobs.close()
    told = 0
    for seed in range(count):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        path = folder / "jobs.sqlite"
        path.write_bytes(damaged(path.read_bytes(), random.Random(seed)))
        try:
            jobs = Jobs(Database(folder))
        except RidgelineError:
            told += 1
        else:
            try:
                asyncio.run(read(jobs))
            except DiskError:
                told += 1
            finally:
                jobs.close()
        assert {each.name for each in (folder / "files").iterdir()} == set(ids), seed
        shutil.rmtree(folder)
    assert told > count / 3


@pytest.mark.parametrize("name", ["files", "jobs.sqlite", "lock"])
def test_what_is_no_folder_or_no_file_is_told_at_the_start(tmp_path, name):
    if name == "files":
        (tmp_path / name).write_text("no folder")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(DiskError, match=str(tmp_path)):
        make(tmp_path)


def test_a_database_that_is_damaged_later_is_told_and_forgotten_by_nobody_else(
    roomy_folder, tmp_path, caplog
):
    with running(roomy_folder, data_dir=tmp_path) as server, server.client() as http:
        start(http, batch_file(2))
        database = server.server.jobs._database
        database._thread.submit(
            lambda: database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        ).result()
        garble(tmp_path / "jobs.sqlite", 4096, 10**7)
        database._thread.submit(  # what SQLite has read already it would not read again
            lambda: database._connection.execute("PRAGMA shrink_memory").fetchall()
        ).result()
        for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_x", "/v1/files/file-x"):
            answer = http.get(path)
            assert answer.status_code == 503, (path, answer.text)
            assert "retry-after" in answer.headers
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        )
        time.sleep(0.1)
    assert not [record for record in caplog.records if record.exc_info]


def pages(server, limit):
    """Bound the database: SQLite then says that the disk is full."""
    server.server.jobs._database.run_blocking(
        lambda db: db.execute(f"PRAGMA max_page_count = {limit}").fetchall()
    )


def test_lines_wait_while_the_disk_is_full_and_none_is_run_twice(
    roomy_folder, tmp_path, monkeypatch
):
    run_line, ran = worker.run_line, []

    async def counted(server, caller, place, line):
        ran.append(place.number)
        return await run_line(server, caller, place, line)

    monkeypatch.setattr(worker, "run_line", counted)
    monkeypatch.setattr(worker, "_DISK_RETRY_S", 0.05)
    settings = {"data_dir": tmp_path, "batch_concurrency": 4}
    with running(roomy_folder, **settings) as server, server.client() as http:
        start_of_it = start(http, batch_file(120))
        while len(ran) < 20:
            time.sleep(0.01)
        pages(server, 1)  # no fewer than there are
        time.sleep(0.5)
        before = len(ran)
        time.sleep(0.5)
        assert len(ran) - before <= 4, "lines run whose results cannot be kept"
        assert http.get(f"/v1/batches/{start_of_it['id']}").json()["status"] == "in_progress"
        pages(server, 1 << 30)
        batch = finished(http, start_of_it["id"])
        assert batch["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
        assert len(lines_of(http, batch["output_file_id"])) == 120
    assert sorted(ran) == list(range(1, 121))


def test_a_server_ends_while_the_disk_is_full(roomy_folder, tmp_path):
    with running(roomy_folder, data_dir=tmp_path) as server, server.client() as http:
        batch = start(http, batch_file(100))
        while not http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"]:
            time.sleep(0.01)
        pages(server, 1)
        time.sleep(0.3)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 20
    with running(roomy_folder, data_dir=tmp_path) as server, server.client() as http:
        counts = finished(http, batch["id"])["request_counts"]
        assert counts == {"total": 100, "completed": 100, "failed": 0}


def test_a_batch_that_is_cancelled_while_it_is_validated_has_its_counts(http, served, monkeypatch):
    read_lines, may_go_on = worker.read_lines, threading.Event()

    def slow(*arguments):
        assert may_go_on.wait(20)
        return read_lines(*arguments)

    monkeypatch.setattr(worker, "read_lines", slow)
    batch = start(http, batch_file(5))
    assert http.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    may_go_on.set()
    batch = finished(http, batch["id"])
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 0}
    assert len(lines_of(http, batch["error_file_id"])) == 5


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_nobody_else_reads_the_data(tmp_path):
    """What others may have been able to read, too."""
    folder = tmp_path / "data"
    make(folder)
    for path in (folder / "jobs.sqlite", folder / "lock"):
        path.chmod(0o644)
    (folder / "files").chmod(0o755)
    database = Database(folder)
    FileStore(database)
    database.run_blocking(lambda db: db.execute("DELETE FROM files"))
    found = modes(folder)
    database.close()
    assert found.pop("data") == found.pop("files") == 0o700
    assert set(found) >= {"jobs.sqlite", "jobs.sqlite-wal", "lock"}
    assert set(found.values()) == {0o600}, found


def test_a_folder_that_others_may_write_to_is_warned_of(tmp_path, caplog):
    tmp_path.chmod(0o777)
    make(tmp_path)
    (warning,) = caplog.messages  # once, not for each file
    assert str(tmp_path) in warning and "0700" in warning
    assert json.dumps(warning).count("\\n") == 0


FAILS = [
    ("ridgeline.server.jobs.upload.os.fsync", "upload"),
    ("ridgeline.server.jobs.files.sync_folder", "upload"),
    ("ridgeline.server.jobs.files.open", "download"),
]


def test_a_small_file_on_a_full_disk_is_a_503(http, served, monkeypatch, caplog):
    """It is in a buffer until the end, and closing the file tries to write it again."""

    class Full(io.FileIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_full_disk(path, mode):
        return io.BufferedWriter(Full(path, mode))

    before = len(list(served.server.jobs.files._folder.iterdir()))
    monkeypatch.setattr("ridgeline.server.jobs.upload.open", on_full_disk, raising=False)
    for form in ({"data": {"purpose": "user_data"}}, {"data": {"purpose": "none"}}):
        answer = http.post("/v1/files", files={"file": ("a", b"content")}, **form)
        assert answer.status_code == 503, answer.text
    assert len(list(served.server.jobs.files._folder.iterdir())) == before
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize(("place", "what"), FAILS)
def test_what_the_disk_refuses_is_a_503_and_passes(
    http, served, monkeypatch, caplog, code, place, what, counted
):
    """Item 37: 12 times at each place; nothing is left behind, and then all is well."""
    form = {"files": {"file": ("a", b"content")}, "data": {"purpose": "user_data"}}
    stored = http.post("/v1/files", **form).json()
    folder = served.server.jobs.files._folder
    before = len(list(folder.iterdir()))

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    def ask():
        if what == "upload":
            return http.post("/v1/files", **form)
        return http.get(f"/v1/files/{stored['id']}/content")

    with monkeypatch.context() as patch:
        patch.setattr(place, refuse, raising=False)
        for _ in range(12):
            answer = ask()
            assert answer.status_code == 503, answer.text
            assert "retry-after" in answer.headers
    assert len(list(folder.iterdir())) == before
    assert ask().status_code == 200
    counted(12)
    assert not [record for record in caplog.records if record.exc_info]
