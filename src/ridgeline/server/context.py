"""What the routes share."""

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.core.encryption import read_key
from ridgeline.core.errors import EngineUnavailableError
from ridgeline.engine.client import EngineClient, Monitored
from ridgeline.engine.guard.guard import Guard
from ridgeline.server.config import ServerConfig
from ridgeline.server.continuation import Routed
from ridgeline.server.conversation import TOLD_PARSER
from ridgeline.server.downloads import Downloads
from ridgeline.server.errors import ApiError, ApiFamily
from ridgeline.server.ids import new_id
from ridgeline.server.jobs.jobs import Jobs
from ridgeline.server.keys import Caller, KeyRing
from ridgeline.server.limits import Limits, Reservation
from ridgeline.server.live import RecentUse
from ridgeline.server.metrics import Metrics
from ridgeline.server.named_prefixes import NamedPrefixes
from ridgeline.server.pool.metrics import PoolCollector
from ridgeline.server.pool.needs import ModelFacts, facts_of
from ridgeline.server.pool.pool import ModelPool, PooledModel
from ridgeline.server.response_cache import ResponseCache, ResponseCacheCollector
from ridgeline.server.semantic.answers import SimilarAnswers, UserQuestion
from ridgeline.server.semantic.cache import SemanticCache
from ridgeline.server.semantic.judge import says_the_same
from ridgeline.server.semantic.metrics import SemanticCacheCollector
from ridgeline.server.tracing import Tracing
from ridgeline.text import ChatTemplate, Tokenizer
from ridgeline.text.output import choose_reasoning_parser, choose_tool_parser

T = TypeVar("T")
_TEXT_THREADS = 2
SHUTTING_DOWN = "The server is shutting down."
_LONG_TEXT_CHARS = 1 << 18
_LONG_BODY_BYTES = 1 << 16


class Server:
    """The engine, the keys and limits, the metrics; and whether new work is taken.

    ``settings`` are the engine's that are not the defaults, for admins to see. ``encoder`` makes
    the vectors of questions, where that is not the served model.

    With several models each has such a view of its own, and shares with the others all but engine,
    names and metrics; the server in front of them, which has their ``pool``, is what calls have
    before `model_for` gives them a model's. ``monitored``: the engine, or all of them.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        jobs: Jobs | None = None,
        settings: Mapping[str, object] | None = None,
        encoder: EngineClient | None = None,
    ) -> None:
        self.engine = engine
        self.monitored: Monitored = engine
        self.pool: ModelPool | None = None
        self.model: PooledModel | None = None
        self.views: Sequence[Server] = (self,)
        self.config = config
        self.settings = settings or {}
        self.keys = KeyRing(config)
        self.limits = Limits(config.max_queue)
        self.metrics = Metrics(engine, config, self.model_name)
        self.router_key = (
            None if config.router_key_file is None else read_key(Path(config.router_key_file))
        )
        guarded = config.guard_config
        self.guard = None if guarded is None else Guard(guarded, self.metrics.guard_decided)
        self.responses = (
            ResponseCache(config.response_cache_mib << 20, config.response_cache_ttl_s)
            if config.response_cache_mib
            else None
        )
        if self.responses is not None:
            self.metrics.registry.register(ResponseCacheCollector(self.responses, self.model_name))
        self.similar = self._similar_answers(encoder or engine)
        self.prefixes = NamedPrefixes(engine, config, self.metrics.charge)
        self.tracing = Tracing(config.otlp_endpoint)
        self.created = int(time.time())
        self.epoch = new_id("")  # of this process
        self.is_warm = False
        self.first_request = "The first request is running."  # or what became of it
        self.is_draining = False
        self.num_watchers = 0  # of the web page's stream
        self.recent_use = RecentUse()
        self.open_requests: set[asyncio.Task[None]] = set()  # each ends when its client has left
        self.downloads = Downloads()
        self._jobs = jobs
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="ridgeline-text")
        # One at a time: they take seconds and gigabytes. Short texts and bodies do not wait.
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-long-text")
        self.bodies = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-body")

    def _similar_answers(self, encoder: EngineClient) -> SimilarAnswers | None:
        config = self.config
        if config.semantic_cache_error is None:
            return None
        cache = SemanticCache(
            max_error=config.semantic_cache_error,
            max_entries=config.semantic_cache_entries,
            audit=config.semantic_cache_audit,
        )
        self.metrics.registry.register(SemanticCacheCollector(cache, self.model_name))
        asks = config.semantic_cache_judge == "model"
        return SimilarAnswers(cache, encoder, self._judge if asks else None)

    async def _judge(self, question: UserQuestion, first: str, second: str) -> bool:
        return await says_the_same(self.engine, self.in_thread, question, first, second)

    @classmethod
    def of_pool(cls, pool: ModelPool, config: ServerConfig, jobs: Jobs | None = None) -> "Server":
        """The server in front of the models of a pool that has started."""
        first = pool.models[0]
        front = cls(first.engine, replace(config, served_model_name=first.named.names), jobs)
        front.monitored, front.pool = pool, pool
        front.metrics.registry.register(PoolCollector(pool))
        front.views = [front._view(model) for model in pool.models]
        front.is_warm = True
        views = {id(model): view for model, view in zip(pool.models, front.views, strict=True)}

        def on_loaded(model: PooledModel) -> None:
            views[id(model)].take_engine(model.engine)
            front.engine = first.engine

        pool.on_loaded = on_loaded
        return front

    def _view(self, model: PooledModel) -> "Server":
        view = copy.copy(self)
        view.engine, view.model, view.views = model.engine, model, (view,)
        view.config = replace(self.config, served_model_name=model.named.names)
        if model.name != self.model_name:
            view.metrics = Metrics(model.engine, view.config, model.name, beside=self.metrics)
        return view

    def take_engine(self, engine: EngineClient) -> None:
        """Go on with an engine that was just loaded."""
        self.engine = self.metrics.engine = engine

    @contextlib.asynccontextmanager
    async def model_for(self, call: "Call", name: str | None) -> AsyncIterator[None]:
        """Within it a call has the server of the model that it names, which is loaded.

        Raises:
            ApiError: there is no such model, it can never fit, or it cannot be loaded; or it is not
                loaded, and as many requests wait and run as the server or the key may have.
            EngineUnavailableError: the server drains, or the model was not loaded in time.
        """
        self.check_taking_work()
        view = self.view_of(self.check_model(name, call.caller))
        assert self.pool is not None
        assert view.model is not None
        call.server = view
        async with contextlib.AsyncExitStack() as leased:
            is_counted = not (call.is_batch or self.pool.takes_requests(view.model))
            with self.limits.waiting(call.caller) if is_counted else contextlib.nullcontext():
                await leased.enter_async_context(self.pool.lease(view.model))
            self.check_taking_work()
            yield

    def keep(self, seconds: float) -> None:
        """Keep the model for so long after its last request; for ever is `math.inf`."""
        if self.pool is not None and self.model is not None:
            self.pool.keep(self.model, seconds)

    def view_of(self, name: str) -> "Server":
        """The server of the model with this name, one of `model_names`."""
        return next(view for view in self.views if name in view.own_names)

    @property
    def sources(self) -> tuple[str, ...]:
        """The models, folders and adapters that are in use."""
        if self.model is not None:
            return self.model.named.config.sources
        return (self.engine.model_name, *self.engine.info.sources)

    @property
    def facts(self) -> ModelFacts:
        """What lists say of the model, loaded or not."""
        return facts_of(self.engine) if self.model is None else self.model.facts

    @property
    def model_name(self) -> str:
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of the model itself."""
        return self.config.served_model_name or (self.engine.model_name,)

    @property
    def own_names(self) -> tuple[str, ...]:
        """What requests for this model may name: it, then its adapters."""
        is_loaded = self.model is None or self.model.state == "loaded"
        return (*self.served_names, *(self.engine.adapters if is_loaded else ()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may name, of every model."""
        return tuple(name for view in self.views for name in view.own_names)

    def check_model(self, name: str | None, caller: Caller) -> str:
        """The name of the model that a request is for.

        Raises:
            ApiError: 404 if it is not served, or not to this caller.
        """
        name = self.model_name if name is None else name
        names = self.models_of(caller)
        if name not in names:
            known = f"there are: {', '.join(names)}" if names else "the key may use none"
            raise ApiError(
                404, f"There is no model {name!r}; {known}.", param="model", code="model_not_found"
            )
        return name

    def models_of(self, caller: Caller) -> list[str]:
        """What this caller may name."""
        allowed = caller.limits.models
        return [name for name in self.model_names if allowed is None or name in allowed]

    def adapter(self, model: str) -> str | None:
        """The adapter that stands behind a model's name."""
        return None if model in self.served_names else model

    def check_taking_work(self) -> None:
        """Raise EngineUnavailableError while the server drains."""
        if self.is_draining:
            raise EngineUnavailableError(SHUTTING_DOWN)

    def end_requests(self) -> None:
        """Answer what is still in progress with an error, in the stream if it has begun."""
        for request in self.open_requests:
            request.cancel()

    @property
    def jobs(self) -> Jobs:
        """Files and batches, of a server that has a data folder."""
        assert self._jobs is not None
        return self._jobs

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ApiError 400 if it has none."""
        if self.engine.tokenizer is None:
            raise ApiError(400, "This model has no tokenizer; give prompts as token ids.")
        return self.engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; ApiError 400 if it has none."""
        if self.engine.chat_template is None:
            raise ApiError(400, "This model has no chat template; use completions.")
        return self.engine.chat_template

    @property
    def template_source(self) -> str:
        """The text of the chat template, empty if there is none."""
        return self.engine.chat_template.source if self.engine.chat_template else ""

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return "tools" in self.template_source

    @property
    def tool_parser(self) -> str | None:
        """The parser of tool calls, by name; ``None`` leaves them in the text."""
        wanted = self.config.tool_call_parser
        if wanted == "auto" and not self.template_knows_tools:
            return TOLD_PARSER
        return _chosen(wanted, choose_tool_parser, self.template_source)

    @property
    def reasoning_parser(self) -> str | None:
        """The parser of reasoning, by name."""
        wanted = self.config.reasoning_parser
        return _chosen(wanted, choose_reasoning_parser, self.template_source)

    async def in_thread(self, function: Callable[..., T], *arguments: Any, num_chars: int = 0) -> T:
        """Run what would hold up the event loop: tokenizing, rendering, files.

        ``num_chars``: the length of the text that it reads.
        """
        threads = self._long_texts if num_chars > _LONG_TEXT_CHARS else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)

    def close(self) -> None:
        """End threads and the guard, send the last spans and release the data folder."""
        self.tracing.close()
        self.downloads.close()
        if self.guard is not None:
            self.guard.close()
        if self.similar is not None:
            self.similar.close()
        if self._jobs is not None:
            self._jobs.close()
        for threads in (self._threads, self._long_texts, self.bodies):
            threads.shutdown(wait=False, cancel_futures=True)


def _chosen(wanted: str, choose: Callable[[str], str | None], template: str) -> str | None:
    if wanted == "auto":
        return choose(template)
    return None if wanted == "none" else wanted


@dataclass(slots=True, kw_only=True)
class Call:
    """One request to a route: who asks, and what is known of it so far for metrics and logs.

    ``path`` is the route's pattern, ``prompt_field`` its field for what the model reads;
    ``is_probe``: it only asks how the server is. ``routed``: what a router said of it.
    ``problem``: the summary of an error. ``arrival_s`` is on the ``time.monotonic``
    clock. ``published_s``: when there was the first text that a user sees; ``is_complete``: no
    output is missing. ``replayed_tokens`` of the output were made before; ``drafted_tokens`` were
    verified for a predicted output, if there is one, and ``accepted_tokens`` of them accepted;
    ``cache_hits`` has, for
    each prompt that was looked up, the id of what was found. Closing ``admission`` gives back the
    place that `admit` took.
    """

    server: Server
    request_id: str
    caller: Caller
    path: str = ""
    query: dict[str, str] = field(default_factory=dict)
    path_params: dict[str, str] = field(default_factory=dict)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    arrival_s: float = field(default_factory=time.monotonic)
    is_batch: bool = False
    is_probe: bool = False
    family: ApiFamily = ApiFamily.OPENAI
    prompt_field: str = "prompt"
    outcome: str = "ok"
    problem: str = ""
    body_bytes: int = 0
    ignored_fields: list[str] = field(default_factory=list)
    ttft_s: float | None = None
    published_s: float | None = None
    is_streamed: bool = False
    is_complete: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    replayed_tokens: int = 0
    drafted_tokens: int | None = None
    accepted_tokens: int = 0
    cache_hits: list[str | None] = field(default_factory=list)
    admission: ExitStack = field(default_factory=ExitStack)
    reservation: Reservation | None = None
    routed: Routed | None = None

    def check_admin(self) -> None:
        """ApiError 403 if this is the admin's to ask, and another asks."""
        if not self.server.keys.may_administer(self.caller):
            text = "This needs the admin key (--admin-api-key, or admin_sha256 in the key file)."
            raise ApiError(403, text)

    def admit(self, *, num_outputs: int = 1, max_tokens: int | None = 0) -> ExitStack:
        """Take a place among the requests in progress, before anything costly is done for it.

        ``max_tokens``: the most that each output may have, ``None`` for as many as the context.

        Raises:
            ApiError: 429 with Retry-After, when the server is full or a limit is reached; not for
                lines of batches, which take no place from requests.
            EngineUnavailableError: the server drains.
        """
        self.server.check_taking_work()
        limits = self.server.limits
        if self.is_batch:
            self.admission.enter_context(limits.admitted_line())
            return self.admission
        context = self.server.engine.config.max_model_len
        most = context if max_tokens is None else min(max_tokens, context)
        self.reservation = self.admission.enter_context(
            limits.admitted(self.caller, num_outputs=num_outputs, output_tokens=num_outputs * most)
        )
        return self.admission

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function makes of the body, in a thread if that is long."""
        if self.body_bytes <= _LONG_BODY_BYTES:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.server.bodies, function, *arguments)

    def publish(self) -> None:
        """Note that there is text that a user sees, if it is the first."""
        if self.published_s is None:
            self.published_s = time.monotonic()

    def charge_input(self, num_tokens: int) -> None:
        """Count prompt tokens towards the key's limit, as `Limits.charge_input` does."""
        if not self.is_batch:
            self.server.limits.charge_input(self.caller, num_tokens)

    def charge_output(self, num_tokens: int) -> None:
        """Count generated tokens towards the key's limit."""
        if not self.is_batch:
            self.server.limits.charge_output(self.caller, num_tokens, self.reservation)
