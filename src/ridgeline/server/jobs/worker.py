"""Runs batches in the capacity that online requests leave."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from ridgeline.core.errors import CorruptFileError, DiskError
from ridgeline.server.context import Server
from ridgeline.server.jobs.batches import BatchStore, Lease, Result
from ridgeline.server.jobs.lines import (
    BatchLine,
    LinePlace,
    read_line,
    read_lines,
    run_line,
    unanswered,
)
from ridgeline.server.jobs.slots import Slots
from ridgeline.server.keys import Caller

_log = logging.getLogger(__name__)
_FLUSH_S = 0.05
_ASK_S = 1.0
_DISK_RETRY_S = 1.0


class BatchWorker:
    """Takes every unfinished batch, after a crash as well, and carries it to its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._batches = server.jobs.batches
        self._files = server.jobs.files
        self._changed = server.jobs.changed
        self._slots = Slots(server.config.batch_concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        told = _Told()
        try:
            while True:
                self._changed.clear()
                try:
                    for batch_id in await self._batches.unfinished():
                        self._begin(batch_id)
                except DiskError as error:
                    told.log("Batches wait", error)
                    await asyncio.sleep(_DISK_RETRY_S)
                    continue
                await self._changed.wait()
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
        """Retry through disk errors and while a file is damaged; a batch never gets lost."""
        told = _Told()
        while True:
            try:
                lease, row = await self._batches.claim(batch_id)
                await self._work(lease, row)
                return
            except (DiskError, CorruptFileError, OSError) as error:
                told.log(f"Batch {batch_id} waits", error)
            except Exception:
                _log.exception("Batch %s failed inside; it is tried again.", batch_id)
            await asyncio.sleep(_DISK_RETRY_S)

    async def _work(self, lease: Lease, row: dict[str, Any]) -> None:
        places, errors = await asyncio.to_thread(self._read_lines, row)
        if row["status"] == "validating":
            if errors:
                await self._batches.fail(lease, errors)
            else:
                await self._batches.move(lease, "in_progress", total=len(places))
        if (await self._batches.row(lease.batch))["status"] == "in_progress":
            caller = self._server.keys.of_tenant(row["tenant"])
            await self._run_lines(lease, caller, row, places)
            await self._batches.move(lease, "finalizing")
        await self._end(lease, places)

    def _read_lines(self, row: dict[str, Any]) -> tuple[list[LinePlace], list[dict[str, Any]]]:
        with self._files.reader(row["tenant"], row["input_file"]) as file:
            return read_lines(file, row["endpoint"])

    def _read_line(self, row: dict[str, Any], place: LinePlace) -> BatchLine:
        with self._files.reader(row["tenant"], row["input_file"]) as file:
            return read_line(file, place)

    async def _end(self, lease: Lease, places: Sequence[LinePlace]) -> None:
        """Write the files; what has no result stands in the error file with the reason, unless
        there was no room for results."""
        row = await self._batches.row(lease.batch)
        if row["status"] not in ("finalizing", "cancelling"):
            return
        if row["errors"] is not None:
            await self._batches.finish(lease, "failed", [])
            return
        done = await self._batches.done_lines(lease.batch)
        rest = [place for place in places if place.number not in done]
        if row["status"] == "cancelling":
            code, text, to = "batch_cancelled", "The batch was cancelled first.", "cancelled"
        else:
            code, text = "batch_expired", "The batch expired first."
            to = "expired" if rest else "completed"
        missing = await asyncio.to_thread(lambda: [unanswered(place, code, text) for place in rest])
        await self._batches.finish(lease, to, missing, total=len(places))

    async def _run_lines(
        self, lease: Lease, caller: Caller, row: dict[str, Any], places: Sequence[LinePlace]
    ) -> None:
        """Run what has no result, until all is done, or the batch is cancelled or expires.

        While results cannot be written no line begins, and none that has ended is lost.

        Raises what kept a line from being run at all, after the others' results are recorded.
        """
        done = await self._batches.done_lines(lease.batch)
        recorder = _Recorder(self._batches, lease)
        recording = asyncio.create_task(recorder.run())
        tasks: set[asyncio.Task[None]] = set()
        failures: list[Exception] = []

        async def one(place: LinePlace) -> None:
            try:
                line = await self._server.in_thread(self._read_line, row, place)
                recorder.put(await run_line(self._server, caller, place, line))
            except Exception as error:
                failures.append(error)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._slots.release()

        try:
            async with asyncio.timeout(_left_s(row)):
                for place in places:
                    if place.number in done:
                        continue
                    await recorder.is_writable.wait()
                    await self._slots.acquire(row["tenant"])
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
        except asyncio.CancelledError:
            recorder.is_last_try = True  # the server ends, and does not wait for the disk
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            recorder.close()
            if recorder.is_last_try:
                await asyncio.gather(recording, return_exceptions=True)
            else:
                await recording
        if failures:
            raise failures[0]


class _Told:
    """Says a lasting trouble once."""

    def __init__(self) -> None:
        self._last = ""

    def log(self, what: str, error: Exception) -> None:
        if str(error) != self._last:
            self._last = str(error)
            _log.error("%s: %s", what, error)


class _Recorder:
    """Writes results in groups, since each transaction waits for the disk.

    What cannot be written is kept and tried again; ``is_writable`` is clear until then. Where there
    is nothing to write it asks now and then whether the batch still runs.
    """

    def __init__(self, batches: BatchStore, lease: Lease) -> None:
        self._batches = batches
        self._lease = lease
        self._pending: list[Result] = []
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()
        self._told = _Told()
        self.is_writable = asyncio.Event()
        self.is_writable.set()
        self.is_last_try = False
        self.has_ended = False  # the batch takes no more results

    def put(self, result: Result) -> None:
        self._pending.append(result)
        self._changed.set()

    def close(self) -> None:
        """Write what is left, then end."""
        self._closed.set()
        self._changed.set()

    async def run(self) -> None:
        """Until closed, or until the batch is cancelled or taken over.

        Raises:
            DiskError: results could not be written, at the last try.
        """
        while not self.has_ended:
            if self._pending or await _is_set(self._changed, within_s=_ASK_S):
                await _is_set(self._closed, within_s=_FLUSH_S)  # more may come
            self._changed.clear()
            closing = self._closed.is_set()
            results = self._pending.copy()
            try:
                self.has_ended = not await self._batches.record(self._lease, results)
            except DiskError as error:
                if self.is_last_try:
                    raise
                self.is_writable.clear()
                self._told.log(f"Batch {self._lease.batch} waits", error)
                await asyncio.sleep(_DISK_RETRY_S)
                continue
            self.is_writable.set()
            del self._pending[: len(results)]
            if closing and not self._pending:
                return


async def _is_set(event: asyncio.Event, *, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
    return event.is_set()


def _left_s(row: dict[str, Any]) -> float:
    """Until a batch expires; no more than it was given, should the clock have been set back."""
    left_s = row["expires"] - time.time()
    return float(min(max(0.0, left_s), row["expires"] - row["created"]))
