"""Runs one batch over a data folder, and dies at the k-th point where data becomes durable.

``python crash_worker.py FOLDER LINES STEP 0``: for k = 1, 1 + STEP, … a fresh folder, a child that
dies at k, one that dies at k + 1, and one that finishes what is left; ends where a run is over
before its point. Prints what each folder holds in the end as one JSON line. Lines are answered by a
stand-in, since the store is what is tested. ``… FOLDER LINES 0 KILLS``: so many kills from
outside at random times, two at most in each fresh folder before one finishes.
"""

import asyncio
import itertools
import json
import os
import random
import select
import shutil
import sqlite3
import sys
import time
import types
from pathlib import Path

from ridgeline.server.config import ServerConfig
from ridgeline.server.jobs import database, worker
from ridgeline.server.jobs.batches import Result
from ridgeline.server.jobs.jobs import Jobs
from ridgeline.server.keys import KeyRing

TENANT = "local"
DIED = 9


class StandIn:
    """What the worker needs of a server."""

    def __init__(self, jobs):
        self.jobs = jobs
        self.config = ServerConfig(batch_concurrency=4)
        self.keys = KeyRing(self.config)

    async def in_thread(self, function, *arguments):
        return await asyncio.to_thread(function, *arguments)


async def answer(_server, _caller, place, _line):
    await asyncio.sleep(0)
    body = json.dumps({"custom_id": place.custom_id}).encode()
    return Result(line=place.number, is_error=place.number % 7 == 0, body=body)


def die_at(point):
    """Die before the k-th commit, fsync or rename, and count them."""
    count = 0

    def step():
        nonlocal count
        count += 1
        if count == point:
            os.kill(os.getpid(), DIED)

    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        step()
        real_fsync(descriptor)

    def rename(self, target):
        step()
        return real_rename(self, target)

    class Connection(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if sql == "COMMIT" and self.total_changes:
                step()
            return super().execute(sql, *arguments)

    real_connect = sqlite3.connect
    database.os = types.SimpleNamespace(**{**vars(os), "fsync": fsync})
    Path.rename = rename
    database.sqlite3 = types.SimpleNamespace(
        **{
            **vars(sqlite3),
            "connect": lambda *a, **k: real_connect(*a, factory=Connection, **k),
        }
    )


async def run(folder, lines):
    """Upload and queue a batch if there is none; work until it is over."""
    jobs = Jobs(database.Database(folder))
    worker.run_line = answer
    worker._FLUSH_S = 0.002
    working = asyncio.create_task(worker.BatchWorker(StandIn(jobs)).run())
    listed, _ = await jobs.batches.list(TENANT, after=None, limit=1)
    if not listed:
        content = "\n".join(
            json.dumps(
                {
                    "custom_id": f"line-{index}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": "a"},
                }
            )
            for index in range(lines)
        )
        file = await jobs.files.add(
            TENANT, "in.jsonl", "batch", lambda target: target.write(content.encode())
        )
        await jobs.batches.create(
            TENANT, endpoint="/v1/completions", input_file=file.id, window="24h",
            window_s=86400, metadata={},
        )  # fmt: skip
        jobs.changed.set()
    while True:
        (batch,), _ = await jobs.batches.list(TENANT, after=None, limit=1)
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            break
        await asyncio.sleep(0.002)
    working.cancel()
    report = {"status": batch["status"], "counts": batch["request_counts"], "ids": {}}
    for kind in ("output", "error"):
        file_id = batch[f"{kind}_file_id"]
        path = jobs.files.path(file_id) if file_id else None
        rows = path.read_text().splitlines() if path else []
        report["ids"][kind] = [json.loads(row)["custom_id"] for row in rows]
    files, _ = await jobs.files.list(TENANT, purpose=None, after=None, limit=100, order="asc")
    report["files"] = len(files)
    report["on_disk"] = len(list((folder / "files").iterdir()))
    await asyncio.gather(working, return_exceptions=True)
    jobs.close()
    return report


def child(folder, lines, point=0, kill_after_s=None):
    """Fork; what the child found, or None if it died, at a point or after a time."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        if point:
            die_at(point)
        report = asyncio.run(run(folder, lines))
        os.write(writer, json.dumps(report).encode())
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], kill_after_s)[0]:
        os.kill(pid, DIED)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if status == 0 else None


def at_random_times(base, lines, kills):
    rng = random.Random(0)
    began_s = time.monotonic()
    folder = Path(base) / "whole"
    folder.mkdir()
    child(folder, lines)
    whole_s = time.monotonic() - began_s
    died = 0
    while died < kills:
        folder = Path(base) / f"random-{died}"
        folder.mkdir()
        deaths = sum(
            child(folder, lines, kill_after_s=rng.random() * whole_s) is None for _ in "ab"
        )
        report = child(folder, lines)
        print(json.dumps({"died": deaths, "report": report}))
        shutil.rmtree(folder)
        died += deaths


def main(base, lines, step, kills):
    if kills:
        at_random_times(base, lines, kills)
        return
    for point in itertools.count(1, step):
        folder = Path(base) / f"crash-{point}"
        folder.mkdir()
        died = child(folder, lines, point) is None
        again = child(folder, lines, point + 1) is None if died else False
        report = child(folder, lines)
        print(json.dumps({"point": point, "died": died, "again": again, "report": report}))
        shutil.rmtree(folder)
        if not died:
            break


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
