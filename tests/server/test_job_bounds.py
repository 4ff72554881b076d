"""What files and batches of a key may take, and that nothing uncounted is left on the disk."""

import asyncio
import io
import sqlite3
import threading
import time
from contextlib import closing

import pytest
from tests.server.running import bound

from ridgeline.core.errors import DiskError
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError
from ridgeline.server.ids import new_id
from ridgeline.server.jobs import files as files_module
from ridgeline.server.jobs.batches import Result
from ridgeline.server.jobs.database import NAME, Database
from ridgeline.server.jobs.folder import open_existing_folder
from ridgeline.server.jobs.jobs import Jobs
from ridgeline.server.jobs.lines import read_lines
from ridgeline.server.jobs.quotas import Quotas
from ridgeline.server.jobs.slots import Slots

BATCH = {"endpoint": "/v1/completions", "window": "24h", "window_s": 9}


@pytest.fixture
def jobs(tmp_path):
    with closing(Jobs(Database(tmp_path))) as jobs:
        yield jobs


def on_disk(jobs):
    return {path.name for path in jobs.files._folder.iterdir()}


async def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def add(jobs, content, tenant="t"):
    return await jobs.files.add(tenant, "in", "batch", lambda writer: writer.write(content))


async def create(jobs, file):
    return await jobs.batches.create("t", input_file=file.id, metadata={}, **BATCH)


def test_a_client_that_leaves_while_its_file_is_written_leaves_none(jobs, monkeypatch):
    """The thread goes on: its file had no row, and no quota counted it."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    write = files_module.write_durably

    def waits(*arguments):
        begun.set()
        assert go_on.wait(10)
        try:
            return write(*arguments)
        finally:
            ended.set()

    async def work():
        making = asyncio.create_task(
            jobs.batches.create_with_input("t", b"{}\n", total=1, prefix="msgbatch_", **BATCH)
        )
        await until(begun.is_set)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        go_on.set()
        await until(ended.is_set)
        await until(lambda: not on_disk(jobs))

    monkeypatch.setattr(files_module, "write_durably", waits)
    asyncio.run(work())


def test_a_client_that_leaves_before_its_file_has_a_row_leaves_none(jobs):
    busy = threading.Event()

    async def work():
        adding = asyncio.create_task(add(jobs, b"x"))
        blocking = asyncio.create_task(jobs._database.run(lambda _: busy.wait(10)))
        await until(lambda: on_disk(jobs) and not any(map(is_partial, on_disk(jobs))))
        await asyncio.sleep(0.02)
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
        busy.set()
        await blocking
        assert not on_disk(jobs)

    asyncio.run(work())


def is_partial(name):
    return name.endswith(".part")


def test_a_batch_whose_end_is_not_stored_leaves_no_files(jobs, monkeypatch):
    """Each try a second later left another two."""

    async def work():
        file = await add(jobs, b"{}\n{}\n")
        lease, _ = await jobs.batches.claim((await create(jobs, file))["id"])
        await jobs.batches.move(lease, "in_progress", total=2)
        results = [Result(line=n, is_error=n == 2, body=b"{}") for n in (1, 2)]
        await jobs.batches.record(lease, results)
        await jobs.batches.move(lease, "finalizing")
        with monkeypatch.context() as patch:
            patch.setattr(jobs.files, "add_within", refuse)
            with pytest.raises(DiskError):
                await jobs.batches.finish(lease, "completed", [])
        assert on_disk(jobs) == {file.id}
        assert await jobs.batches.finish(lease, "completed", [])
        assert len(on_disk(jobs)) == 3

    asyncio.run(work())


def test_a_file_whose_row_cannot_be_begun_is_discarded(jobs, tmp_path):
    jobs._database.run_blocking(lambda db: db.execute("PRAGMA busy_timeout = 0"))
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DiskError):
            asyncio.run(add(jobs, b"x"))
    assert not on_disk(jobs)


def refuse(*_):
    raise DiskError("full")


def test_lines_are_counted_as_they_are_read(jobs, monkeypatch):
    bound(monkeypatch, jobs, lines=4)

    async def work():
        file = await add(jobs, b"{}\n\n{}\n")
        made = [await create(jobs, file) for _ in range(2)]
        assert [each["request_counts"]["total"] for each in made] == [2, 2]
        with pytest.raises(ApiError) as refused:
            await create(jobs, file)
        assert (refused.value.status, refused.value.code) == (429, "batch_limit")
        lease, _ = await jobs.batches.claim(made[0]["id"])
        await jobs.batches.fail(lease, [{"code": "invalid_line"}])
        found = await jobs.batches.get("t", made[0]["id"])
        assert found["request_counts"]["total"] == 0

    asyncio.run(work())


def test_a_batch_that_never_fits_is_not_told_to_wait(jobs, monkeypatch):
    bound(monkeypatch, jobs, lines=2)

    async def work():
        with pytest.raises(ApiError) as refused:
            await create(jobs, await add(jobs, b"{}\n" * 3))
        error = refused.value
        assert (error.status, error.code) == (413, "batch_limit")
        assert b"retry-after" not in dict(error.headers)

    asyncio.run(work())


def test_a_file_that_is_deleted_while_it_is_counted_is_not_there(jobs, monkeypatch):
    reader = jobs.files.reader

    def deleted(tenant, file_id):
        jobs._database.run_blocking(lambda db: jobs.files.delete_within(db, tenant, file_id))
        jobs.files.path(file_id).unlink()
        return reader(tenant, file_id)

    async def work():
        file = await add(jobs, b"{}\n")
        monkeypatch.setattr(jobs.files, "reader", deleted)
        with pytest.raises(ApiError) as refused:
            await create(jobs, file)
        assert refused.value.status == 404

    asyncio.run(work())


def test_files_of_a_key_have_a_number(tmp_path, jobs, monkeypatch):
    bound(monkeypatch, jobs, files=2)

    def room(tenant):
        return jobs._database.run_blocking(lambda db: jobs.files._quotas.check_room(db, tenant, 1))

    async def work():
        first, _ = [await add(jobs, b"xx") for _ in range(2)]
        with pytest.raises(ApiError, match="You have 2 files, and may have 2: delete some"):
            async with jobs.files.arriving("t"):
                pass
        await jobs.files.delete("t", first.id)
        assert room("t") == room("u") - 2

    asyncio.run(work())
    jobs.close()
    with closing(Jobs(Database(tmp_path), Quotas(storage_bytes=10))) as again:
        found = again._database.run_blocking(lambda db: again.files._quotas.room_bytes(db, "t"))
        assert found == 8


def test_uploads_after_each_other_share_the_room(jobs, monkeypatch):
    bound(monkeypatch, jobs, storage_bytes=10)

    async def work():
        async with jobs.files.arriving("t") as count:
            count(1)
            async with jobs.files.arriving("t") as other:
                other(6)
                file_id = new_id("file-")
                jobs.files.temporary(file_id).write_bytes(b"x" * 6)
                await jobs.files.adopt(file_id, "t", "a", "batch", 6)
            count(3)
            with pytest.raises(ApiError, match="your uploads so far leave no room"):
                count(1)
        assert jobs.files._arriving == {}

    asyncio.run(work())


def test_a_folder_that_cannot_be_looked_for_is_no_folder(tmp_path):
    """Where a parent may not be searched, Python 3.11 raises in the same way."""
    config = ServerConfig(data_dir=str(tmp_path / ("x" * 300)))
    assert open_existing_folder(config, 8000) is None


def test_slots_go_round_by_key():
    order = []

    async def work():
        slots = Slots(1)
        await slots.acquire("a")

        async def one(tenant):
            await slots.acquire(tenant)
            order.append(tenant)
            slots.release()

        tasks = [asyncio.create_task(one(tenant)) for tenant in "xaaaabb"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        slots.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.num_free == 1

    asyncio.run(work())
    assert "".join(order) == "ababaa"


def test_a_slot_that_comes_as_its_batch_is_cancelled_is_not_lost():
    async def work():
        slots = Slots(1)
        await slots.acquire("a")
        task = asyncio.create_task(slots.acquire("a"))
        await asyncio.sleep(0)
        slots.release()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert slots.num_free == 1

    asyncio.run(work())


def test_a_file_of_blank_lines_is_not_read_to_its_end():
    """Once 10 s for 200 MB of them."""
    file = io.BytesIO(b"\n" * (200 << 20))
    places, errors = read_lines(file, "/v1/completions")
    assert not places
    assert [each["message"] for each in errors] == ["50000 blank lines at the most."]
    assert file.tell() < 100_000
