"""Items 38 to 40 of the catalogue: batches through crashes, cancellations and races."""

import asyncio
import itertools
import json
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.batches import TRANSITIONS, BatchStore, Lease, Result
from ridgeline.server.jobs.database import TERMINAL, Database
from ridgeline.server.jobs.files import FileStore
from ridgeline.server.jobs.quotas import Quotas

FULL = pytest.mark.slow
SCAN = re.compile("SCAN (?!CONSTANT ROW|.* open_batches)")
WORKER = Path(__file__).with_name("crash_worker.py")


def crashes(folder, lines, step, kills=0):
    command = [sys.executable, str(WORKER), *map(str, (folder, lines, step, kills))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(entry, lines):
    """Every line is in one of the files, once; no file is lost or left over."""
    report = entry["report"]
    assert report["status"] == "completed", entry
    ids = report["ids"]["output"] + report["ids"]["error"]
    assert sorted(ids) == sorted(f"line-{index}" for index in range(lines)), entry
    assert report["counts"]["total"] == lines
    assert report["counts"]["completed"] == len(report["ids"]["output"])
    # A client that died between upload and batch uploads again: its first file stays its own.
    assert report["files"] == report["on_disk"], entry
    assert 3 <= report["files"] <= 5, entry


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        (12, 3),
        pytest.param(12, 1, marks=pytest.mark.slow),
        pytest.param(1000, 1, marks=pytest.mark.slow),
    ],
)
def test_dying_at_durable_points(tmp_path, lines, step, counted):
    """Items 38 and 39: before a commit, fsync or rename; and once more right after."""
    entries = crashes(tmp_path, lines, step)
    assert len(entries) > 5
    assert not entries[-1]["died"], "the last point lies beyond the end of a whole run"
    assert all(entry["died"] for entry in entries[:-1])
    for entry in entries:
        check(entry, lines)
    counted(len(entries))


@pytest.mark.parametrize(("kills", "lines"), [(3, 12), pytest.param(200, 1000, marks=FULL)])
def test_dying_at_random_times(tmp_path, kills, lines, counted):
    """Item 38: SIGKILL from outside, whatever is being done."""
    entries = crashes(tmp_path, lines, 0, kills)
    died = sum(entry["died"] for entry in entries)
    assert died >= kills
    for entry in entries:
        check(entry, lines)
    counted(died)


class Store:
    """A batch in a folder of its own."""

    def __init__(self, folder):
        self.database = Database(folder)
        self.files = FileStore(self.database)
        self.batches = BatchStore(self.database, self.files)

    async def start(self):
        file = await self.files.add("t", "in", "batch", lambda target: target.write(b"x"))
        batch = await self.batches.create(
            "t", endpoint="/v1/completions", input_file=file.id, window="24h", window_s=9,
            metadata={},
        )  # fmt: skip
        return batch["id"]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.database.close()


def row(number):
    return Result(line=number, is_error=False, body=b'{"custom_id": "%d"}' % number)


def test_only_legal_transitions(store):
    """Item 40: from every state to every other, what is not in the table does not happen."""

    async def work():
        everything = {*TRANSITIONS, *TERMINAL}
        for target, path in itertools.product(sorted(everything), PATHS):
            batch = await store.start()
            lease, _ = await store.batches.claim(batch)
            for state in path:
                assert await store.batches.move(lease, state)
            source = path[-1] if path else "validating"
            moved = await store.batches.move(lease, target)
            assert moved == (target in TRANSITIONS.get(source, ())), (source, target)
            assert (await store.batches.row(batch))["status"] == (target if moved else source)

    asyncio.run(work())


PATHS = [
    (), ("in_progress",), ("in_progress", "finalizing"), ("cancelling",), ("failed",),
    ("in_progress", "finalizing", "completed"), ("in_progress", "finalizing", "expired"),
    ("cancelling", "cancelled"), ("in_progress", "cancelling"),
]  # fmt: skip


def test_a_stale_worker_writes_nothing(store):
    """The lease of a worker that was taken over is worth nothing."""

    async def work():
        batch = await store.start()
        old, _ = await store.batches.claim(batch)
        assert await store.batches.move(old, "in_progress", total=2)
        assert await store.batches.record(old, [row(1)])
        new, _ = await store.batches.claim(batch)
        assert not await store.batches.record(old, [row(2)])
        assert not await store.batches.move(old, "finalizing")
        assert not await store.batches.finish(old, "completed", [])
        twice = Result(line=1, is_error=True, body=b"another")
        assert await store.batches.record(new, [twice, row(2)])
        assert await store.batches.move(new, "finalizing")
        assert await store.batches.finish(new, "completed", [])
        found = await store.batches.get("t", batch)
        assert found["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        text = store.files.path(found["output_file_id"]).read_bytes()
        assert text == row(1).body + b"\n" + row(2).body + b"\n"

    asyncio.run(work())


def test_texts_do_not_stay_in_the_database(tmp_path):
    """Once they are in the files they go, and the counts stay, also where a line has no result."""
    store = Store(tmp_path)

    async def work():
        batch = await store.start()
        lease, _ = await store.batches.claim(batch)
        assert await store.batches.move(lease, "in_progress", total=3)
        error = Result(line=2, is_error=True, body=b"secret two")
        right = Result(line=1, is_error=False, body=b"secret one" * 1000)
        assert await store.batches.record(lease, [right, error])
        running = await store.batches.get("t", batch)
        assert await store.batches.move(lease, "finalizing")
        missing = Result(line=3, is_error=True, body=b"none")
        assert await store.batches.finish(lease, "expired", [missing])
        found = await store.batches.get("t", batch)
        assert found["request_counts"] == running["request_counts"]
        assert found["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
        assert not await store.batches.done_lines(batch)
        lines = store.files.path(found["error_file_id"]).read_bytes().splitlines()
        assert lines == [error.body, missing.body]

    asyncio.run(work())
    store.database.close()
    assert b"secret" not in (tmp_path / "jobs.sqlite").read_bytes()


@pytest.mark.parametrize("absent", [("result_bytes",), ("completed", "failed", "result_bytes")])
def test_a_folder_of_a_version_that_counted_results_when_it_was_asked(tmp_path, absent):
    async def begun(store):
        batch = await store.start()
        lease, _ = await store.batches.claim(batch)
        assert await store.batches.move(lease, "in_progress", total=3)
        assert await store.batches.record(lease, [Result(line=1, is_error=False, body=b"right")])
        return batch

    store = Store(tmp_path)
    batch = asyncio.run(begun(store))
    store.database.run_blocking(lambda db: db.execute("UPDATE batches SET completed = 0"))
    for name in absent:
        store.database.run_blocking(
            lambda db, name=name: db.execute(f"ALTER TABLE batches DROP {name}")
        )
    store.database.close()
    store = Store(tmp_path)
    found = asyncio.run(store.batches.get("t", batch))
    assert found["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
    quotas = Quotas(storage_bytes=100)
    assert store.database.run_blocking(lambda db: quotas.room_bytes(db, "t")) == 100 - 1 - 6
    store.database.close()


def test_others_have_the_database_while_the_files_of_a_batch_are_written(tmp_path, monkeypatch):
    """With 100 MB of results nobody had it for 8 s."""
    store, listed = Store(tmp_path), threading.Event()
    write = BatchStore._write_lines

    def waits(*arguments):
        assert listed.wait(10)
        write(*arguments)

    async def work():
        batch = await store.start()
        lease, _ = await store.batches.claim(batch)
        await store.batches.move(lease, "in_progress", total=250)
        rows = [Result(line=line, is_error=False, body=b"%d" % line) for line in range(250)]
        await store.batches.record(lease, rows)
        await store.batches.move(lease, "finalizing")
        ending = asyncio.create_task(store.batches.finish(lease, "completed", []))
        await asyncio.sleep(0.05)
        await store.files.list("u", purpose=None, after=None, limit=1, order="desc")
        listed.set()
        assert await ending
        found = await store.batches.get("t", batch)
        lines = store.files.path(found["output_file_id"]).read_bytes().split()
        assert lines == [b"%d" % line for line in range(250)]
        assert not await store.batches.done_lines(batch)
        # What a crash leaves of a batch that is over goes at the next start.
        store.database.run_blocking(
            lambda db: db.execute("INSERT INTO results VALUES (?, 1, 0, x'00')", (batch,))
        )
        return batch

    monkeypatch.setattr(BatchStore, "_write_lines", waits)
    batch = asyncio.run(work())
    store.database.close()
    store = Store(tmp_path)
    assert not asyncio.run(store.batches.done_lines(batch))
    store.database.close()


def test_lists_and_changes_read_no_table_to_its_end(tmp_path):
    store, seen = Store(tmp_path), []

    async def work():
        for _ in range(2):
            batch = await store.start()
        lease, _ = await store.batches.claim(batch)
        await store.batches.move(lease, "in_progress", total=1)
        await store.batches.record(lease, [Result(line=1, is_error=False, body=b"right")])
        await store.batches.unfinished()
        for cursor in ({}, {"after": batch}, {"before": batch}):
            await store.batches.list("t", limit=1, prefix="batch_", **cursor)
        for order in ("asc", "desc"):
            await store.files.list("t", purpose="batch", after=None, limit=1, order=order)
        await store.batches.move(lease, "finalizing")
        await store.batches.finish(lease, "completed", [])
        await store.batches.delete("t", batch)

    store.database.run_blocking(lambda db: db.set_trace_callback(seen.append))
    asyncio.run(work())
    store.database.run_blocking(lambda db: db.set_trace_callback(None))
    reads = [each for each in seen if each.lstrip().startswith(("SELECT", "UPDATE", "DELETE"))]
    assert len(reads) > 20
    for each in reads:
        plan = store.database.run_blocking(
            lambda db, each=each: [
                row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {each}")
            ]
        )
        scans = [step for step in plan if SCAN.match(step)]
        assert not scans, (each, plan)
    store.database.close()


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_races_end_in_one_legal_state(store, count, counted):
    """Item 40: workers, a cancel and an expiry race; late results are dropped."""

    async def race(seed):
        generator = random.Random(seed)
        batch = await store.start()
        leases: list[Lease] = []

        async def pause():
            await asyncio.sleep(generator.random() * 0.002)

        async def worker():
            await pause()
            lease, _ = await store.batches.claim(batch)
            leases.append(lease)
            await store.batches.move(lease, "in_progress", total=3)
            for number in (1, 2, 3):
                await pause()
                await store.batches.record(lease, [row(number)])
            await store.batches.move(lease, "finalizing")
            await pause()
            done = await store.batches.done_lines(batch)
            rest = [row(number) for number in (1, 2, 3) if number not in done]
            state = (await store.batches.row(batch))["status"]
            ends = "cancelled" if state == "cancelling" else "expired" if rest else "completed"
            await store.batches.finish(lease, ends, rest)

        async def cancel():
            await pause()
            try:
                await store.batches.cancel("t", batch)
            except ApiError as error:
                assert error.status == 409

        await asyncio.gather(worker(), cancel(), worker())
        lease, row_now = await store.batches.claim(batch)
        if row_now["status"] == "cancelling":
            assert await store.batches.finish(lease, "cancelled", [])
        found = await store.batches.get("t", batch)
        assert found["status"] in TERMINAL, found
        if found["status"] == "completed":
            assert found["request_counts"]["completed"] == 3
        ended = [name for name in TERMINAL if found[f"{name}_at"] is not None]
        assert ended == [found["status"]]

    async def work():
        for seed in range(count):
            await race(seed)

    asyncio.run(work())
    counted(count)


def test_two_servers_cannot_share_a_folder(store, tmp_path):
    from ridgeline.core.errors import InvalidRequestError

    with pytest.raises(InvalidRequestError, match="--data-dir"):
        Database(tmp_path)
