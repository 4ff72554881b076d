"""`ModelPool`: engines of several models in one memory budget, each in a process of its own."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineUnavailableError, RidgelineError, SettingsError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.client import EngineClient
from ridgeline.engine.loading import Progress, describe_model
from ridgeline.engine.stats import EngineStats, EngineStatus, Health
from ridgeline.server.errors import ApiError
from ridgeline.server.first_request import run_first_request
from ridgeline.server.pool.needs import (
    DISK_BYTES_PER_S,
    PROCESS_S,
    ModelFacts,
    ModelNeeds,
    facts_of,
    needs_of,
)
from ridgeline.server.pool.policy import RequestRate, SwitchPolicy, Tenancy

_log = logging.getLogger(__name__)
_TICK_S = 0.25  # between looks at who has waited or idled too long
_MEASURE_S = 1.0
_RETRY_S = 5.0  # after a load that failed
_LEARNS_BYTES = 64 << 20  # of weights, from which on a load tells how fast the disk is


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served under ``names``; answers have the first."""

    names: tuple[str, ...]
    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """``budget_bytes`` are for all engines together. A model that was idle for ``ttl_s`` is let
    go; a request waits for ``wait_s`` at the most until its model is loaded.
    """

    budget_bytes: int
    ttl_s: float = math.inf
    wait_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What a server with several models is started with."""

    models: tuple[ServedModel, ...]
    config: PoolConfig


@dataclass(slots=True, kw_only=True)
class PooledModel:
    """One model of a pool. ``engine`` is one that was not started while there is none loaded.

    ``state`` is unloaded, loading, loaded or unloading. ``idle_s``: since when no request runs;
    ``keep_s``: for how long it is kept then. ``failure``: why it was not loaded, at ``failed_s``.
    """

    named: ServedModel
    needs: ModelNeeds
    facts: ModelFacts
    tenancy: Tenancy
    engine: AsyncEngine
    keep_s: float
    state: str = "unloaded"
    idle_s: float = 0.0
    failure: str | None = None
    failed_s: float = -math.inf
    num_loads: int = 0
    waiters: dict[object, asyncio.Future[None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.tenancy.name

    @property
    def expires_in_s(self) -> float:
        """Seconds until it is let go, if nobody asks for it."""
        if self.tenancy.running:
            return self.keep_s
        return max(0.0, self.idle_s + self.keep_s - time.monotonic())


class ModelPool:
    """Loads models as they are asked for, and lets others go for them, as `SwitchPolicy` says.

    An engine that dies harms its own requests alone, and a model that cannot be loaded those that
    wait for it. Every method is called in the event loop in which `start` was awaited.
    """

    def __init__(
        self, config: PoolConfig, *, on_loaded: Callable[[PooledModel], object] = lambda _: None
    ) -> None:
        self.config = config
        self.models: list[PooledModel] = []
        self.on_loaded = on_loaded
        self._policy = SwitchPolicy(config.budget_bytes, max_wait_s=config.wait_s / 4)
        self._disk_bytes_per_s = DISK_BYTES_PER_S
        self._measured_s = 0.0
        self._changed = asyncio.Event()
        self._switching = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def start(
        self, models: Sequence[ServedModel], *, progress: Progress | None = None
    ) -> None:
        """Find every model, and begin to serve; none is loaded yet.

        Raises what describing a model raises, and SettingsError where none of them can fit.
        """
        now = time.monotonic()
        for named in models:
            description = await asyncio.to_thread(describe_model, named.config, progress=progress)
            needs = needs_of(named.config, description, self.config.budget_bytes)
            tenancy = Tenancy(
                name=named.names[0],
                num_bytes=needs.num_bytes,
                load_s=self._predicted_s(needs),
                rate=RequestRate(began_s=now),
            )
            self.models.append(
                PooledModel(
                    named=named,
                    needs=needs,
                    facts=needs.facts,
                    tenancy=tenancy,
                    engine=AsyncEngine(needs.config),
                    keep_s=self.config.ttl_s,
                )
            )
        least, budget = min(m.tenancy.num_bytes for m in self.models), self.config.budget_bytes
        if least > budget:
            raise SettingsError(
                f"No model fits: the smallest needs {_gib(least)}, and all together have "
                f"{_gib(budget)} (--memory)."
            )
        self._begin(self._run())

    @contextlib.asynccontextmanager
    async def lease(self, model: PooledModel) -> AsyncIterator[EngineClient]:
        """Within it the model is loaded, and stays.

        Raises:
            ApiError: 400 for a model that can never fit, 503 for one that cannot be loaded.
            EngineUnavailableError: it was not loaded in time, or the server ends.
        """
        self.check_fits(model)
        if time.monotonic() < model.failed_s + _RETRY_S:
            raise _failed(model)
        model.tenancy.rate.count(time.monotonic())
        if self.takes_requests(model):
            model.tenancy.running += 1
        else:
            await self._wait(model)
        try:
            yield model.engine
        finally:
            model.tenancy.running -= 1
            model.idle_s = time.monotonic()
            self._changed.set()

    def check_fits(self, model: PooledModel) -> None:
        """Raise ApiError 400 for a model that needs more than the whole budget."""
        needed, budget = model.tenancy.num_bytes, self.config.budget_bytes
        if needed > budget:
            raise ApiError(
                400,
                f"{model.name} needs {_gib(needed)}, and all models together have {_gib(budget)} "
                "(--memory).",
                param="model",
                code="model_does_not_fit",
            )

    async def unload(self, model: PooledModel) -> None:
        """Let a model go; nothing happens if it is not loaded.

        Raises:
            ApiError: 409 while it has requests.
        """
        async with self._switching:
            if model.tenancy.running or model.waiters:
                raise ApiError(409, f"{model.name} has requests in progress.", code="in_use")
            if model.state == "loaded":
                await self._unload(model)
        self._changed.set()

    def keep(self, model: PooledModel, seconds: float) -> None:
        """Keep a model for so long after its last request; 0 lets it go when that ends."""
        model.keep_s = seconds
        self._changed.set()

    def health(self) -> Health:
        """Whether requests are taken; models are loaded for them."""
        if self._is_closing:
            return Health(status=EngineStatus.DRAINING, reason="The engines are shutting down.")
        return Health(status=EngineStatus.READY)

    def stats(self) -> EngineStats:
        """The sum over what is loaded; of ``kv_usage`` the fullest."""
        found = [model.engine.stats() for model in self.models]
        summed = {
            name: sum(getattr(each, name) for each in found)
            for name in ("num_running", "prefix_queries", "prefix_hits", "num_preemptions",
                         "prompt_tokens", "generated_tokens", "num_restarts")
        }  # fmt: skip
        waiting = sum(each.num_waiting for each in found)
        return EngineStats(
            **summed,
            num_waiting=waiting + sum(len(model.waiters) for model in self.models),
            kv_usage=max(each.kv_usage for each in found),
        )

    @property
    def num_open_requests(self) -> int:
        """Requests that were begun and have not ended."""
        return sum(model.engine.num_open_requests for model in self.models)

    async def delete_tenant(self, tenant: str) -> None:
        """Forget all KV of a tenant's; a model that is not loaded has none."""
        for model in self.models:
            await model.engine.delete_tenant(tenant)

    async def shutdown(self) -> None:
        """End every engine."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self.models:
            _fail_waiters(model, EngineUnavailableError("The server is shutting down."))
        await asyncio.gather(*(model.engine.shutdown() for model in self.models))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def takes_requests(self, model: PooledModel) -> bool:
        """Whether a request for it runs at once."""
        is_dead = model.engine.health().status is EngineStatus.DEAD
        return model.state == "loaded" and not model.tenancy.is_leaving and not is_dead

    async def _wait(self, model: PooledModel) -> None:
        """Wait until the request counts as one of those that run."""
        if self._is_closing:
            raise EngineUnavailableError("The server is shutting down.")
        token: object = object()
        waiter = model.waiters[token] = asyncio.get_running_loop().create_future()
        model.tenancy.waiting[token] = time.monotonic()
        self._changed.set()
        try:
            async with asyncio.timeout(self.config.wait_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                model.tenancy.running -= 1  # it had just been let in
            if isinstance(error, TimeoutError):
                text = f"{model.name} could not be loaded in time: others are in use."
                raise EngineUnavailableError(text) from None
            raise
        finally:
            model.waiters.pop(token, None)
            model.tenancy.waiting.pop(token, None)
            self._changed.set()

    async def _run(self) -> None:
        """Let in who can run, let go who idles, and switch when that is due."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            if not self._switching.locked():
                self._look(now)
            for model in self.models:
                if self.takes_requests(model):
                    _let_in(model)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()

    def _look(self, now: float) -> None:
        loaded = [model for model in self.models if model.state == "loaded"]
        if now >= self._measured_s + _MEASURE_S:
            self._measured_s = now
            for model in loaded:
                resident = _resident_bytes(model.engine)
                model.tenancy.num_bytes = max(model.tenancy.num_bytes, resident)
        for model in loaded:
            is_dead = model.engine.health().status is EngineStatus.DEAD
            is_idle = not (model.tenancy.running or model.waiters)
            if is_dead or (is_idle and now - model.idle_s >= model.keep_s):
                self._begin(self._switch(None, [model]))
                return
        tenancies = [model.tenancy for model in self.models]
        of_tenancy = {id(model.tenancy): model for model in self.models}
        if (switch := self._policy.next_switch(tenancies, now)) is not None:
            leave = [of_tenancy[id(each)] for each in switch.leave]
            self._begin(self._switch(of_tenancy[id(switch.load)], leave))

    async def _switch(self, load: PooledModel | None, leave: Sequence[PooledModel]) -> None:
        async with self._switching:
            if load is not None and any(model.tenancy.running for model in leave):
                return  # since it was decided
            for model in leave:
                model.state = "unloading"
            for model in leave:
                await self._unload(model)
            if load is not None and load.state == "unloaded":
                await self._load(load)
        self._changed.set()

    async def _unload(self, model: PooledModel) -> None:
        """The memory is back once this is over: the process has ended."""
        model.state = "unloading"
        await model.engine.shutdown()
        model.engine, model.state = AsyncEngine(model.needs.config), "unloaded"
        model.tenancy.loaded_s = None
        model.keep_s = self.config.ttl_s
        _log.info("%s is let go.", model.name)

    async def _load(self, model: PooledModel) -> None:
        """A failure is that of the requests that wait for it."""
        began_s = time.monotonic()
        model.state, model.tenancy.loaded_s = "loading", began_s
        engine = model.engine
        try:
            await engine.start()
            await run_first_request(engine)
        except Exception as error:  # it is that of the requests that wait, whatever it is
            is_told = isinstance(error, RidgelineError)
            _log.error("%s cannot be loaded: %s", model.name, error, exc_info=not is_told)
            await self._unload(model)
            model.failure = str(error) if is_told else "the server failed while it loaded it."
            model.failed_s = time.monotonic()
            _fail_waiters(model, _failed(model))
            return
        self._note_load(model, time.monotonic() - began_s)
        try:
            self.check_fits(model)
        except ApiError as error:
            await self._unload(model)
            _fail_waiters(model, error)
            return
        model.state, model.idle_s = "loaded", time.monotonic()
        model.failure, model.num_loads = None, model.num_loads + 1
        self.on_loaded(model)

    def _note_load(self, model: PooledModel, seconds: float) -> None:
        """What was measured stands for what was predicted, here and for models still to load."""
        facts = model.facts = replace(facts_of(model.engine), root=model.facts.root)
        resident = _resident_bytes(model.engine)
        kv_bytes = model.engine.config.kv_cache_bytes
        model.tenancy.num_bytes = model.needs.measured_bytes(kv_bytes, resident)
        _log.info(
            "%s is loaded in %.1f s (predicted: %.1f s), and takes %s (predicted: %s).",
            model.name, seconds, model.tenancy.load_s,
            _gib(model.tenancy.num_bytes), _gib(model.needs.num_bytes),
        )  # fmt: skip
        model.tenancy.load_s = seconds
        if facts.weights_bytes >= _LEARNS_BYTES and seconds > PROCESS_S:
            self._disk_bytes_per_s = facts.weights_bytes / (seconds - PROCESS_S)
            for other in self.models:
                if not other.num_loads and other is not model:
                    other.tenancy.load_s = self._predicted_s(other.needs)

    def _predicted_s(self, needs: ModelNeeds) -> float:
        return PROCESS_S + needs.facts.weights_bytes / self._disk_bytes_per_s


def _let_in(model: PooledModel) -> None:
    for waiter in model.waiters.values():
        if not waiter.done():
            waiter.set_result(None)
            model.tenancy.running += 1
    model.waiters.clear()
    model.tenancy.waiting.clear()


def _fail_waiters(model: PooledModel, error: Exception) -> None:
    for waiter in model.waiters.values():
        if not waiter.done():
            waiter.set_exception(error)


def _failed(model: PooledModel) -> ApiError:
    text = f"{model.name} cannot be loaded: {model.failure}"
    return ApiError(503, text, code="model_not_loaded", retry_after_s=_RETRY_S)


def _resident_bytes(engine: AsyncEngine) -> int:
    """What an engine's process has in memory now; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        if (pid := engine.worker_pid) is not None:
            return int(psutil.Process(pid).memory_info().rss)
    return 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
