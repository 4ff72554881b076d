"""Runs batches in the capacity that online requests leave."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from ridgeline.core.errors import DiskError
from ridgeline.server.context import Server
from ridgeline.server.jobs.batches import BatchStore, Lease, Result
from ridgeline.server.jobs.files import FileStore
from ridgeline.server.jobs.lines import LinePlace, read_line, read_lines, run_line, unanswered
from ridgeline.server.keys import Caller

_log = logging.getLogger(__name__)
_FLUSH_LINES = 64
_FLUSH_S = 0.05
_DISK_RETRY_S = 1.0


class BatchWorker:
    """Takes every unfinished batch, after a crash as well, and carries it to its end."""

    def __init__(self, server: Server, batches: BatchStore, files: FileStore) -> None:
        self._server = server
        self._batches = batches
        self._files = files
        self._slots = asyncio.Semaphore(server.config.batch_concurrency)
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def notify(self) -> None:
        """There is a new batch, or one is to be cancelled."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    for batch_id in await self._batches.unfinished():
                        self._begin(batch_id)
                except DiskError as error:
                    _log.error("Batches wait: %s", error)
                    await asyncio.sleep(_DISK_RETRY_S)
                    continue
                await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, batch_id: str) -> None:
        if batch_id not in self._tasks:
            task = asyncio.create_task(self._carry(batch_id))
            self._tasks[batch_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(batch_id, None))

    async def _carry(self, batch_id: str) -> None:
        """Retry through disk errors; a batch never gets lost."""
        while True:
            try:
                lease, row = await self._batches.claim(batch_id)
                await self._work(lease, row)
                return
            except DiskError as error:
                _log.error("Batch %s waits: %s", batch_id, error)
            except Exception:
                _log.exception("Batch %s failed inside; it is tried again.", batch_id)
            await asyncio.sleep(_DISK_RETRY_S)

    async def _work(self, lease: Lease, row: dict[str, Any]) -> None:
        path = self._files.path(row["input_file"])
        places, errors = await asyncio.to_thread(read_lines, path, row["endpoint"])
        if row["status"] == "validating":
            if errors:
                await self._batches.move(lease, "failed", errors=json.dumps(errors))
            else:
                await self._batches.move(lease, "in_progress", total=len(places))
        if await self._batches.status(lease.batch) == "in_progress":
            caller = self._server.keys.of_tenant(row["tenant"])
            await self._run_lines(lease, caller, row, places)
            await self._batches.move(lease, "finalizing")
        await self._end(lease, places)

    async def _end(self, lease: Lease, places: Sequence[LinePlace]) -> None:
        """Write the files; what has no result stands in the error file with the reason."""
        status = await self._batches.status(lease.batch)
        if status not in ("finalizing", "cancelling"):
            return
        done = await self._batches.done_lines(lease.batch)
        rest = [place for place in places if place.number not in done]
        if status == "cancelling":
            code, text, to = "batch_cancelled", "The batch was cancelled first.", "cancelled"
        else:
            code, text = "batch_expired", "The batch expired first."
            to = "expired" if rest else "completed"
        await self._batches.finish(lease, to, [unanswered(place, code, text) for place in rest])

    async def _run_lines(
        self, lease: Lease, caller: Caller, row: dict[str, Any], places: Sequence[LinePlace]
    ) -> None:
        """Run what has no result, until all is done, or the batch is cancelled or expires.

        Raises what kept a line from being run at all, after the others' results are recorded.
        """
        done = await self._batches.done_lines(lease.batch)
        path = self._files.path(row["input_file"])
        recorder = _Recorder(self._batches, lease)
        recording = asyncio.create_task(recorder.run())
        tasks: set[asyncio.Task[None]] = set()
        failures: list[Exception] = []

        async def one(place: LinePlace) -> None:
            try:
                line = await self._server.in_thread(read_line, path, place)
                recorder.put(await run_line(self._server, caller, place, line))
            except Exception as error:
                failures.append(error)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._slots.release()

        try:
            async with asyncio.timeout(max(0.0, row["expires"] - time.time())):
                for place in places:
                    if place.number in done:
                        continue
                    await self._slots.acquire()
                    if failures or recorder.has_ended or recording.done():
                        self._slots.release()
                        break
                    task = asyncio.create_task(one(place))
                    tasks.add(task)
                    task.add_done_callback(ended)  # also if it is cancelled before it begins
                while tasks and not failures and not recording.done():
                    await asyncio.wait((*tasks, recording), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass  # expired: what is done is kept, the rest is not run
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            recorder.close()
            await recording
        if failures:
            raise failures[0]


class _Recorder:
    """Writes results in groups, since each transaction waits for the disk."""

    def __init__(self, batches: BatchStore, lease: Lease) -> None:
        self._batches = batches
        self._lease = lease
        self._pending: list[Result] = []
        self._changed = asyncio.Event()
        self._closed = False
        self.has_ended = False  # the batch takes no more results

    def put(self, result: Result) -> None:
        self._pending.append(result)
        if len(self._pending) >= _FLUSH_LINES:
            self._changed.set()

    def close(self) -> None:
        """Write what is left, then end."""
        self._closed = True
        self._changed.set()

    async def run(self) -> None:
        """Until closed, or until the batch is cancelled or taken over."""
        while not self.has_ended:
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            closing = self._closed
            results, self._pending = self._pending, []
            # An empty group asks whether the batch still runs.
            self.has_ended = not await self._batches.record(self._lease, results)
            if closing and not self._pending:
                return
