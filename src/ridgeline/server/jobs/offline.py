"""A batch without a server: a file in, files out, and the same meaning."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from ridgeline.core.checks import check_int
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import DiskError, EngineError, InvalidRequestError, SettingsError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.loading import Progress
from ridgeline.server.config import ServerConfig
from ridgeline.server.context import Server
from ridgeline.server.jobs.lines import (
    ENDPOINTS,
    BatchLine,
    LinePlace,
    read_line,
    read_lines,
    run_line,
)
from ridgeline.server.keys import ANONYMOUS, Caller


class OfflineBatch:
    """Checks the whole input at once; lines that the outputs have already are not run again.

    Raises:
        SettingsError: ``concurrency`` is out of bounds.
        InvalidRequestError: the input is missing, a line of it is not as it should be, or it is
            the output.
    """

    def __init__(self, source: Path, output: Path, *, concurrency: int) -> None:
        check_int("concurrency", concurrency, 1, 4096, error=SettingsError)
        self._source = source
        self._output = output
        self._errors = output.with_name(f"{output.stem}.errors{output.suffix}")
        self._concurrency = concurrency
        try:
            with source.open("rb") as file:
                places, problems = read_lines(file, _endpoint(source))
        except OSError as error:
            raise InvalidRequestError(f"{source} cannot be read: {error.strerror}.") from error
        if output.exists() and output.samefile(source):
            raise InvalidRequestError("The answers would be written into the input.")
        if problems:
            first = problems[0]
            where = "" if first["line"] is None else f", line {first['line']}"
            others = f" It is the first of {len(problems)} lines at fault." if problems[1:] else ""
            raise InvalidRequestError(f"{source}{where}: {first['message']}{others}")
        answered = _custom_ids(output) | _custom_ids(self._errors)
        self.total = len(places)
        self._places = [place for place in places if place.custom_id not in answered]
        self.done = self.total - len(self._places)

    async def run(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        on_line: Callable[[], None] = lambda: None,
    ) -> dict[str, int]:
        """Run what is left; returns how many of all lines are completed and failed.

        Raises what starting an engine raises, and:
            EngineError: the engine stopped; what was done until then stands in the files.
            DiskError: a result could not be written.
        """
        if self._places:
            async with AsyncEngine(config, in_process=True, progress=progress) as engine:
                server = Server(engine, ServerConfig())
                try:
                    await self._run_lines(server, on_line)
                except EngineError as error:
                    num_done = sum(self._counts().values())
                    raise EngineError(
                        f"{error} {num_done} of {self.total} lines are done; the same command runs "
                        "the others."
                    ) from error
                finally:
                    server.close()
        return self._counts()

    def _read_line(self, place: LinePlace) -> BatchLine:
        with self._source.open("rb") as file:
            return read_line(file, place)

    def _counts(self) -> dict[str, int]:
        return {
            "completed": len(_custom_ids(self._output)),
            "failed": len(_custom_ids(self._errors)),
        }

    async def _run_lines(self, server: Server, on_line: Callable[[], None]) -> None:
        slots = asyncio.Semaphore(self._concurrency)
        caller = Caller(tenant=ANONYMOUS)

        async def one(place: LinePlace) -> None:
            async with slots:
                line = await server.in_thread(self._read_line, place)
                result = await run_line(server, caller, place, line)
            target = self._errors if result.is_error else self._output
            try:
                with open(target, "ab") as file:
                    file.write(result.body + b"\n")
            except OSError as error:
                raise DiskError(f"{target} cannot be written: {error.strerror}.") from error
            on_line()

        try:
            async with asyncio.TaskGroup() as group:
                for place in self._places:
                    group.create_task(one(place))
        except BaseExceptionGroup as group_error:  # one cause is enough to tell
            raise group_error.exceptions[0] from None


def _endpoint(source: Path) -> str:
    """The url of the first line, which is that of all."""
    with open(source, "rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                where = f"{source}, line {number}"
                try:
                    url = json.loads(data).get("url")
                except (ValueError, AttributeError, RecursionError):
                    raise InvalidRequestError(f"{where}: It is not a JSON object.") from None
                if isinstance(url, str) and url in ENDPOINTS:
                    return url
                known = ", ".join(ENDPOINTS)
                raise InvalidRequestError(f"{where}: Its url must be one of {known}.")
    raise InvalidRequestError(f"{source} has no requests.")


def _custom_ids(path: Path) -> set[str]:
    """The lines that a file has; one that a crash cut short counts as missing, and is cut off."""
    if not path.exists():
        return set()
    found, size = set(), 0
    with open(path, "rb") as file:
        for data in file:
            if not data.endswith(b"\n"):
                break
            try:
                found.add(str(json.loads(data)["custom_id"]))
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{path} is there, and is no output of a batch: nothing is written to it."
                ) from error
            size += len(data)
    if size < path.stat().st_size:
        with open(path, "r+b") as file:
            file.truncate(size)
    return found
