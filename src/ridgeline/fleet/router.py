"""`Router`: which engine a request goes to, and how the engines are."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.encryption import read_key
from ridgeline.core.errors import SettingsError
from ridgeline.fleet.body_memory import BodyMemory
from ridgeline.fleet.breaker import RetryBudget
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.handing_over import HandingOver, SentTo
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.upstream import UpstreamPool
from ridgeline.server.config import is_loopback
from ridgeline.server.continuation import router_token
from ridgeline.server.ids import new_id

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_LOST_S = 60.0  # of silence, until one that has joined is forgotten
_MOST_DROPPED = 256  # that are remembered
_MOST_BODIES = 32  # of the largest, at once
PREFIX = "ridgeline_router_"  # of metrics


class Router(Collector):
    """Owns the engines and the policy; used in one event loop.

    Raises:
        SettingsError: an address is none, or the key file cannot be used.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        key = None if config.router_key_file is None else read_key(Path(config.router_key_file))
        self.token = None if key is None else router_token(key)
        self.epoch = new_id("")  # of this process
        self.dropped: deque[str] = deque(maxlen=_MOST_DROPPED)  # URLs, which may join again
        self._num_named = 0
        self.engines: list[RoutedEngine] = []  # another list when one comes or goes
        for url in config.engine:
            self.engines.append(self._new_engine(url))
        self.policy = POLICIES[config.policy]()
        self.budget = RetryBudget()
        self.bodies = BodyMemory(_MOST_BODIES * config.max_body_mib << 20)
        self.is_draining = False
        self.num_open = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self.retries = self._counter("retries", "Requests sent again before their first byte.")
        self.continuations = self._counter("continuations", "Streams that went on elsewhere.")
        self._watched: list[Callable[[], list[Metric]]] = []
        self.handovers = self._counter("handovers", "Streams that went on after another's prompt.")
        self.handing_over: HandingOver | None = None
        if config.disaggregate != "off":
            self.handing_over = HandingOver(always=config.disaggregate == "always")
        self.registry.register(self)
        self._models: tuple[str, ...] = ()
        self._refuses_open = not is_loopback(config.host)
        self._probing: dict[RoutedEngine, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def _new_engine(self, url: str, *, is_joined: bool = False) -> RoutedEngine:
        """Names are numbers, and of one engine each: policies hash them."""
        pool = UpstreamPool(url, connect_timeout_s=self.config.connect_timeout_s)
        if any(each.pool.url == pool.url for each in self.engines):
            raise SettingsError(f"The engine {pool.url} is there twice.")
        name, self._num_named = str(self._num_named), self._num_named + 1
        return RoutedEngine(name, pool, self.token, is_joined=is_joined)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    async def start(self) -> None:
        """Ask every engine how it is, and go on asking."""
        await asyncio.gather(*(self._probe(each) for each in self.engines))
        for each in self.engines:
            if each not in self._probing:
                self._probing[each] = asyncio.create_task(self._keep_probing(each))
        self._watching = asyncio.create_task(self._end_silent())

    async def close(self) -> None:
        """End the probes and the connections."""
        tasks = [*self._probing.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self.engines:
            engine.pool.close()

    async def add_engine(self, url: str, *, is_joined: bool = False) -> RoutedEngine:
        """One more, which takes requests as soon as it says that it does.

        One that ``is_joined`` is started and ended by somebody else, and dropped when it is lost.

        Raises:
            SettingsError: the address is none, or is there.
        """
        engine = self._new_engine(url, is_joined=is_joined)
        engine.answered_s = asyncio.get_running_loop().time()
        if engine.pool.url in self.dropped:
            self.dropped.remove(engine.pool.url)
        self.engines = [*self.engines, engine]
        self._probing[engine] = asyncio.create_task(self._keep_probing(engine))
        await self._probe(engine)
        return engine

    async def retire(self, engine: RoutedEngine, *, drain_s: float | None = None) -> None:
        """Send no more to an engine, wait until what it has has ended, and forget it.

        What has not ended in ``drain_s`` (that of the router, if ``None``) goes on elsewhere, or is
        sent there anew, as if the engine were lost.

        Raises:
            SettingsError: it is the first, which keeps files, batches and responses.
        """
        if engine is self.engines[0]:
            raise SettingsError("The first engine keeps files and batches, and cannot leave.")
        engine.leave()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (self.config.drain_s if drain_s is None else drain_s)
        while engine.tracker.num_requests:
            if loop.time() >= deadline_s:
                for attempt in tuple(engine.attempts):
                    attempt.fail("The engine is leaving.")
            await asyncio.sleep(_POLL_S)
        self.engines = [each for each in self.engines if each is not engine]
        if (task := self._probing.pop(engine, None)) is not None:
            task.cancel()
        engine.pool.close()

    def choose(
        self, request: RoutedRequest, tried: Collection[RoutedEngine]
    ) -> RoutedEngine | None:
        """The best engine of those that take requests and were not ``tried``; ``None`` if there is
        none. What one engine keeps is asked of the first."""
        return self._best(request, self._able(request, tried))

    def place(self, request: RoutedRequest, tried: Collection[RoutedEngine]) -> SentTo | None:
        """As `choose`, and whether the request is to end there with its first token."""
        able = self._able(request, tried)
        engine = self._best(request, able)
        if engine is None:
            return None
        if self.handing_over is None or not able[1:] or not request.generates:
            return SentTo(engine=engine)
        now_s = asyncio.get_running_loop().time()
        return self.handing_over.place(request, able, able.index(engine), now_s)

    def next_after(self, request: RoutedRequest, source: RoutedEngine) -> RoutedEngine | None:
        """Where a request goes on that was to be handed over, and whose prompt ``source`` has
        computed; ``None`` if no engine takes it."""
        able = self._able(request, ())
        if self.handing_over is None or source not in able:
            return self._best(request, able)
        now_s = asyncio.get_running_loop().time()
        return self.handing_over.next(request, able, source, now_s)

    def _able(self, request: RoutedRequest, tried: Collection[RoutedEngine]) -> list[RoutedEngine]:
        now_s = asyncio.get_running_loop().time()
        engines = self.engines[:1] if request.is_for_first else self.engines
        return [each for each in engines if each not in tried and each.takes_requests(now_s)]

    def _best(self, request: RoutedRequest, able: list[RoutedEngine]) -> RoutedEngine | None:
        if not able[1:]:
            return able[0] if able else None
        by_name = {each.name: each for each in able}
        candidates = [each.candidate(request) for each in able]
        return by_name[self.policy.ranked(request.wanted, candidates)[0].name]

    async def wait_for(self, request: RoutedRequest, deadline_s: float) -> RoutedEngine | None:
        """The best engine as soon as there is one; ``None`` if there is none in time."""
        loop = asyncio.get_running_loop()
        while (engine := self.choose(request, ())) is None and loop.time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return engine

    @property
    def num_up(self) -> int:
        """Engines that take requests."""
        now_s = asyncio.get_running_loop().time()
        return sum(each.takes_requests(now_s) for each in self.engines)

    def watch(self, collect: Callable[[], list[Metric]]) -> None:
        """Publish these as well."""
        self._watched.append(collect)

    def exposition(self) -> bytes:
        """What Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> list[Metric]:
        """How each engine is now."""
        now_s = asyncio.get_running_loop().time()
        families: list[Metric] = []
        for name, text, value in (
            ("engine_up", "Whether it takes requests.", lambda e: e.takes_requests(now_s)),
            ("engine_breaker_open", "Whether it is left alone.", lambda e: not e.breaker.allows),
            ("engine_requests_pending", "Without a byte.", lambda e: e.tracker.num_pending),
            ("engine_requests_running", "Being answered.", lambda e: e.tracker.num_running),
            ("engine_tokens_pending", "Of their prompts.", lambda e: e.tracker.pending_tokens),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=["engine"])
            for engine in self.engines:
                family.add_metric([engine.pool.url], float(value(engine)))
            families.append(family)
        return families + [metric for collect in self._watched for metric in collect()]

    async def _keep_probing(self, engine: RoutedEngine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await engine.wait_for_doubts(self.config.probe_s)
            await self._probe(engine)
            is_lost = engine.is_joined and loop.time() >= engine.answered_s + _LOST_S
            if is_lost and not engine.is_leaving:
                _log.warning("%s is lost, and dropped until it joins again.", engine.pool.url)
                self.dropped.append(engine.pool.url)
                await self.retire(engine, drain_s=0.0)
                return

    async def _probe(self, engine: RoutedEngine) -> None:
        await engine.probe(refuses_open=self._refuses_open)
        self._exclude_others()

    def _exclude_others(self) -> None:
        """Engines that serve other models than the first one that told its own."""
        told = [each for each in self.engines if each.is_up and each.state.models]
        self._models = self._models or next((each.state.models for each in told), ())
        for each in told:
            if each.state.models != self._models:
                theirs, ours = ", ".join(each.state.models), ", ".join(self._models)
                each.exclude(f"It serves {theirs}, where the others serve {ours}.")

    async def _end_silent(self) -> None:
        """Give up streams whose engine has said nothing for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.config.silence_s))
            before_s = loop.time() - self.config.silence_s
            for engine in self.engines:
                for attempt in tuple(engine.attempts):
                    if attempt.has_fallen_silent(before_s):
                        attempt.fail("The engine has fallen silent.")
