"""Engines that come and go while a router runs: by hand, or as the autoscaler decides."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from ridgeline.core.errors import EngineError, RidgelineError, SettingsError
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.router import Router

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_MOST_START_S = 600.0
_SMOOTHING = 0.3  # weight of the newest start in the time of a start


class Replicas(Protocol):
    """What starts and ends engines."""

    async def start(self) -> str:
        """Start one; returns its URL once it listens.

        Raises:
            EngineError: it does not start, or there is no place for it.
        """
        ...

    async def end(self, url: str) -> None:
        """End one that has drained."""
        ...


class FleetControl:
    """Adds engines to a router and takes them out.

    ``replicas`` starts and ends them; without it engines are added by their URL. ``start_s``:
    running mean of what one takes until it is asked. ``starting``: when those that start began.
    """

    def __init__(self, router: Router, replicas: Replicas | None, *, start_s: float) -> None:
        self.router, self.replicas, self.start_s = router, replicas, start_s
        self.starting: list[float] = []
        self.num_lost_starts = 0
        self._tasks = set[asyncio.Task[object]]()

    @property
    def staying(self) -> list[RoutedEngine]:
        """Those that are not leaving; the first never does."""
        return [each for each in self.router.engines if not each.is_leaving]

    @property
    def owned(self) -> list[RoutedEngine]:
        """Those of them whose number is decided here: all that have not joined."""
        return [each for each in self.staying if not each.is_joined]

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Do it beside what comes; what fails is logged."""
        task = asyncio.create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Until all that was to be done is."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Leave off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add(self, url: str | None = None) -> RoutedEngine:
        """One more engine: that of a URL, or a new one, once it takes requests.

        Raises:
            SettingsError: it needs a URL, or the URL is none or is there.
            EngineError: it does not start.
        """
        if url is not None:
            return await self.router.add_engine(url, is_joined=True)
        if self.replicas is None:
            raise SettingsError("This router starts no engines: give the URL of one that runs.")
        begin_s = asyncio.get_running_loop().time()
        self.starting.append(begin_s)
        try:
            url = await self.replicas.start()
        except BaseException:
            self.num_lost_starts += 1
            raise
        finally:
            self.starting.remove(begin_s)  # from here on it is one of the router's
        try:
            return await self._add_when_up(url, begin_s)
        except BaseException:
            self.num_lost_starts += 1
            await self.replicas.end(url)
            raise

    async def _add_when_up(self, url: str, begin_s: float) -> RoutedEngine:
        loop, engine = asyncio.get_running_loop(), await self.router.add_engine(url)
        while not engine.is_up:
            if engine.is_leaving or loop.time() > begin_s + _MOST_START_S:
                if not engine.is_leaving:
                    await self.router.retire(engine, drain_s=0.0)
                raise EngineError(f"{url} does not take requests: {engine.reason}")
            engine.doubt()
            await asyncio.sleep(_POLL_S)
        self.start_s += _SMOOTHING * (loop.time() - begin_s - self.start_s)
        return engine

    async def retire(self, engine: RoutedEngine) -> None:
        """Let an engine drain, and end it.

        Raises:
            SettingsError: it is the first, which keeps files, batches and responses.
        """
        await self.router.retire(engine)
        if self.replicas is not None:
            await self.replicas.end(engine.pool.url)

    async def _logged(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except (RidgelineError, OSError) as error:
            _log.error("The fleet is not as it was to be: %s", error)
        except Exception:
            _log.exception("The fleet is not as it was to be.")
