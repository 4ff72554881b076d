"""The engines behind a router: how each is, and what it has to do."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import msgspec

from ridgeline.fleet.breaker import CircuitBreaker
from ridgeline.fleet.load import LoadTracker, TrackedRequest
from ridgeline.fleet.policies import EngineChoice
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.upstream import UNREADABLE, Attempt, OwnLimitError, UpstreamError, UpstreamPool
from ridgeline.scheduler.prediction import DEFAULT_PREDICTOR
from ridgeline.server.continuation import ROUTER_KEY
from ridgeline.server.schemas.operations import EngineState

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 2.0
_MOST_STATE_BYTES = 64 << 10
_ASSUMED_BYTES_PER_S = 125e6  # of KV, before any came
_DECODER = msgspec.json.Decoder(EngineState)
_UNKNOWN = EngineState(
    ready=True,
    reason="",
    is_open=False,
    epoch="",
    models=(),
    max_seqs=256,
    kv_tokens=1 << 17,
    pass_s=DEFAULT_PREDICTOR.pass_s,
    token_s=DEFAULT_PREDICTOR.token_s,
    pair_s=DEFAULT_PREDICTOR.pair_s,
)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class RoutedEngine:
    """One engine: its connections, its breaker, its load as this router knows it.

    ``is_up``: its last probe said that it takes requests. ``not_before_s``: until when it wants to
    be left alone (Retry-After). ``is_leaving``: it ends what it has, and gets no more.
    ``is_joined``: it was added by its URL, and somebody else starts and ends it. ``answered_s``:
    when it last answered a probe, or was added.
    """

    def __init__(
        self, name: str, pool: UpstreamPool, token: bytes | None, *, is_joined: bool = False
    ) -> None:
        self.name, self.pool, self._token = name, pool, token
        self.is_joined = is_joined
        self.answered_s = 0.0
        self.breaker = CircuitBreaker()
        self.tracker = LoadTracker()
        self.state = _UNKNOWN
        self.is_up = self.is_leaving = False
        self.reason = "It has not answered yet."
        self.not_before_s = 0.0
        self.attempts: set[Attempt] = set()
        self._doubted = asyncio.Event()

    def leave(self) -> None:
        """It gets no more requests."""
        self.is_up, self.reason, self.is_leaving = False, "It is leaving.", True

    def takes_requests(self, now_s: float) -> bool:
        return self.is_up and self.breaker.allows and now_s >= self.not_before_s

    def candidate(self, request: RoutedRequest) -> EngineChoice:
        """Itself, as policies see it."""
        state = self.state
        return self.tracker.choice(
            self.name,
            request.blocks,
            linear=state.linear,
            pass_s=state.pass_s,
            max_seqs=state.max_seqs,
            kv_tokens=state.kv_tokens,
        )

    def source_bytes_per_s(self, other: "RoutedEngine") -> float:
        """How fast KV comes to it from another engine; 0 if it cannot be read of that."""
        rate = self.state.kv_sources.get(other.state.kv_name)
        return 0.0 if rate is None else rate or _ASSUMED_BYTES_PER_S

    def lost(self, error: UpstreamError) -> None:
        """A request failed by the engine's fault: no other is sent before it answers a probe."""
        if isinstance(error, OwnLimitError):
            return
        self.breaker.fail()
        self._note(False, str(error))
        self._doubted.set()

    def doubt(self) -> None:
        """Have it asked how it is, soon."""
        self._doubted.set()

    async def wait_for_doubts(self, most_s: float) -> None:
        """Until a request fails, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._doubted.wait(), most_s)
        self._doubted.clear()

    @contextlib.contextmanager
    def tracked(
        self, request: RoutedRequest, *, is_computed: bool = False
    ) -> Iterator[TrackedRequest]:
        """Count a request in the load until the block ends; ``is_computed`` as `LoadTracker.begin`
        has it."""
        tracked = self.tracker.begin(request.wanted, request.blocks, is_computed=is_computed)
        self.breaker.begin()
        try:
            yield tracked
        finally:
            tracked.end()
            self.breaker.release()

    async def probe(self, *, refuses_open: bool) -> None:
        """Ask how the engine is; a failure counts for the breaker, and opens it in the end.

        ``refuses_open``: an engine that anyone may call is not used.
        """
        if not self.breaker.wants_probe:
            return
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                state = await self._ask()
        except OwnLimitError:
            return
        except (UpstreamError, TimeoutError, *UNREADABLE) as error:
            self.breaker.fail()
            self._note(False, str(error) or "It does not answer.")
            if not self.breaker.allows:
                for attempt in tuple(self.attempts):
                    attempt.fail("The engine does not answer.")
            return
        self.breaker.probed()
        self.answered_s = asyncio.get_running_loop().time()
        self.state = state
        self.tracker.prefixes.renew(state.epoch, state.kv_tokens)
        if state.is_open and refuses_open:
            self._note(False, "It asks for no keys, and this router can be reached from outside.")
        else:
            self._note(state.ready, state.reason or "")

    def exclude(self, reason: str) -> None:
        """It answers, but is not used before its next probe."""
        self._note(False, reason)

    async def _ask(self) -> EngineState:
        if self._token is None:
            status, _ = await self._get(b"/health")
            told, body = await self._get(b"/v1/models")
            listed = msgspec.json.decode(body, type=_Models).data if told == 200 else []
            models = tuple(each.id for each in listed)
            return msgspec.structs.replace(_UNKNOWN, ready=status == 200, models=models)
        status, body = await self._get(b"/fleet/state", b"%b: %b\r\n" % (ROUTER_KEY, self._token))
        if status != 200:
            raise UpstreamError(f"It answers {status}: is its router_key_file this router's?")
        return _DECODER.decode(body)

    async def _get(self, path: bytes, shown: bytes = b"") -> tuple[int, bytes]:
        """The status and the body.

        Raises:
            UpstreamError: it breaks off, or is longer than any state.
        """
        host = f"{self.pool.host}:{self.pool.port}".encode()
        attempt = await self.pool.send(
            b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (path, host, shown)
        )
        try:
            head = await attempt.head
            return head.status, await attempt.whole(_MOST_STATE_BYTES)
        finally:
            attempt.close()

    def _note(self, is_up: bool, reason: str) -> None:
        if self.is_leaving:
            return
        if is_up != self.is_up:
            level = logging.INFO if is_up else logging.WARNING
            _log.log(level, "%s is %s. %s", self.pool.url, "up" if is_up else "not used", reason)
        self.is_up, self.reason = is_up, reason
