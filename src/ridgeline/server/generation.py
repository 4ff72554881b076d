"""Running the prompts of one call on the engine."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ridgeline.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NoTokenError,
    OverloadedError,
)
from ridgeline.core.request import (
    CompletionChunk,
    FinishReason,
    GenerateRequest,
    RequestTimings,
)
from ridgeline.core.result import TokenLogprobs
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.beam_search import BeamParams, BeamSearch, finish_reason
from ridgeline.engine.guard.stream import guarded
from ridgeline.engine.sample_output import text_pieces
from ridgeline.server.context import Call
from ridgeline.server.continuation import HandedOverError, PriorChunk, StreamState
from ridgeline.server.cost import cost_of
from ridgeline.server.errors import bad_request
from ridgeline.server.ids import new_id
from ridgeline.server.known_answers import OWN_ENDS, Asked, Piece, repeated, similar
from ridgeline.server.metrics import Meter
from ridgeline.server.output_formats import refused_format
from ridgeline.server.response_cache import ReplayedChunk, cache_key
from ridgeline.server.schemas.generation import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Retraction,
    Usage,
)
from ridgeline.server.semantic.answers import UserQuestion

MAX_SEQUENCES = 2048
MAX_BEAM_TOKENS = 1 << 17  # of prompts, which each step of a beam search sends to the engine anew
BATCH_PRIORITY = 1 << 30  # after everything that somebody waits for
_BUFFERED_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The prompts of a call as token ids, and how to continue them.

    ``format_fields``: those of the request from which the grammar of the output was made.
    ``question``: what is asked, of one prompt with one plain answer, for which a similar one's may
    stand in. ``beams``: look for the likeliest ``params.n`` outputs, rather than draw them.
    ``expected_token_ids``: of an output that the caller expects.
    """

    call: Call
    prompts: Sequence[tuple[int, ...]]
    params: SamplingParams
    adapter: str | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    format_fields: tuple[str, ...] = ()
    beams: BeamParams | None = None
    question: UserQuestion | None = None
    expected_token_ids: tuple[int, ...] = ()

    @property
    def state(self) -> StreamState | None:
        """How far another server has come with it."""
        return None if self.call.routed is None else self.call.routed.state

    @property
    def hands_over(self) -> bool:
        """Whether another server goes on with its outputs once they have begun."""
        routed = self.call.routed
        return routed is not None and routed.hands_over and not self.beams

    @property
    def repeats(self) -> bool:
        """Whether the outputs would be the same again."""
        return bool(self.beams) or self.params.temperature == 0 or self.params.seed is not None

    def seed_of(self, prompt: int) -> int | None:
        """The seed of a prompt where the request has none, if a router gave one."""
        return None if self.call.routed is None else self.call.routed.seed_of(prompt)

    def __post_init__(self) -> None:
        if len(self.prompts) * self.params.n > MAX_SEQUENCES:
            raise bad_request(
                f"A request may ask for {MAX_SEQUENCES} outputs at the most, over all prompts.", "n"
            )
        if self.beams and sum(map(len, self.prompts)) * self.params.n > MAX_BEAM_TOKENS:
            raise bad_request(
                f"A beam search may have {MAX_BEAM_TOKENS} tokens of prompts, times n.", "n"
            )
        if self.state is not None:
            count = len(self.prompts) * self.params.n
            if self.beams or any(not 0 <= choice < count for choice in self.state.choices):
                raise bad_request("This stream cannot go on: it has not such choices.")


async def generate(job: Job) -> AsyncGenerator[Piece, None]:
    """Pieces of the outputs, each with the index of its choice: prompt · n + sample.

    They have passed the server's guard, if it has one. Closing it aborts what is left. Its end is
    that of the call's admission.

    Raises:
        ApiError: the grammar of the output was refused.
        HandedOverError: a router's call has begun, and is to go on elsewhere.
        NoTokenError: an output ended in an error.
    """
    call, server = job.call, job.call.server
    with call.admission:
        if job.state is None:  # else another engine, which began with it, has counted it
            call.charge_input(sum(map(len, job.prompts)))
        meter = server.metrics.meter(call)
        source = _metered(job, meter)
        if server.guard is not None:
            source = guarded(
                source,
                server.guard,
                num_samples=job.params.n,
                num_prompts=len(job.prompts),
                streams=call.is_streamed,
                in_whole_chunks=call.routed is not None,
                is_known=lambda chunk: isinstance(chunk, PriorChunk),
            )
        begun, num_ended = set[int](), 0
        try:
            async for choice, chunk in source:
                if chunk.finish_reason is not None and not isinstance(chunk, PriorChunk):
                    server.metrics.finished(chunk.finish_reason)
                num_ended += chunk.finish_reason is not None
                yield choice, chunk
                if chunk.token_ids or chunk.finish_reason:
                    begun.add(choice)
                if job.hands_over and num_ended < len(begun) == len(job.prompts) * job.params.n:
                    call.is_complete = True
                    raise HandedOverError
            call.is_complete = True
        except GeneratorExit:
            if call.is_complete:  # the reader had enough of what is left
                for _ in range(len(job.prompts) * job.params.n - num_ended):
                    server.metrics.finished(FinishReason.STOP)
            raise
        except InvalidRequestError as error:
            raise refused_format(error, job.format_fields) from None
        finally:
            await source.aclose()
            cost = cost_of(call)
            meter.close(None if cost is None else cost.total)
            call.ttft_s = meter.ttft_s


async def _metered(job: Job, meter: Meter) -> AsyncGenerator[Piece, None]:
    """What the engine gives, counted for the call's usage and limits."""
    call = job.call
    sources = _sources(job)
    source = sources[0] if len(sources) == 1 else _merged(sources)
    async with contextlib.aclosing(source):
        async for choice, chunk in source:
            if isinstance(chunk, PriorChunk | ReplayedChunk):
                call.output_tokens += len(chunk.token_ids)
            if isinstance(chunk, ReplayedChunk):
                call.replayed_tokens += len(chunk.token_ids)
                if chunk.prompt is not None:
                    call.prompt_tokens += chunk.prompt.num_tokens
                    call.cached_tokens += chunk.prompt.num_tokens
            if isinstance(chunk, PriorChunk | ReplayedChunk):
                yield choice, chunk
                continue
            if chunk.prompt is not None and job.state is None:
                call.prompt_tokens += chunk.prompt.num_tokens
                call.cached_tokens += chunk.prompt.num_cached_tokens
            call.output_tokens += len(chunk.token_ids)
            if call.drafted_tokens is not None and call.server.engine.config.takes_predictions:
                call.drafted_tokens += chunk.num_drafted
                call.accepted_tokens += chunk.num_accepted
            if job.beams is None:  # which are charged as they grow
                call.charge_output(len(chunk.token_ids))
            meter.take(choice, chunk)
            if chunk.finish_reason in (FinishReason.ERROR, FinishReason.SHED):
                call.server.metrics.finished(chunk.finish_reason)
            if chunk.finish_reason is FinishReason.ERROR:
                raise NoTokenError
            if chunk.finish_reason is FinishReason.SHED:
                raise OverloadedError(
                    "The queue is full of more urgent requests.", retry_after_s=1.0
                )
            yield choice, chunk


def _sources(job: Job) -> list[AsyncGenerator[Piece, None]]:
    if job.state is None:
        return [_known_or_new(job, prompt) for prompt in range(len(job.prompts))]
    job.call.prompt_tokens = sum(map(len, job.prompts))
    return [_rest(job, choice, job.state) for choice in range(len(job.prompts) * job.params.n)]


def _pieces(job: Job, prompt: int) -> AsyncGenerator[Piece, None]:
    ids, first = job.prompts[prompt], prompt * job.params.n
    if job.beams is not None:
        return _beams(job, ids, job.beams, first)
    return _one(job, ids, job.params, first, seed=job.seed_of(prompt))


def _known_or_new(job: Job, prompt: int) -> AsyncGenerator[Piece, None]:
    """The outputs of a prompt: as they came out before, if they did and would again; or those to a
    similar question, where there may be such; or new ones."""
    call, responses, answers = job.call, job.call.server.responses, job.call.server.similar
    source = _pieces(job, prompt)
    salt = salt_of(call.caller.tenant, job.cache_salt)
    if responses is not None and job.repeats:
        key = cache_key(
            _model_of(job), job.adapter, salt, job.prompts[prompt], job.params, job.beams
        )
        n = job.params.n
        source = repeated(call, responses, key, source, num_samples=n, first=prompt * n)
        if call.cache_hits[-1] is not None:
            return source
    if answers is not None and job.question is not None:
        params = replace(job.params, seed=None)
        asked = Asked(
            question=job.question,
            scope=(
                call.caller.tenant,
                cache_key(_model_of(job), job.question.context, job.adapter, salt, params),
            ),
            num_prompt_tokens=len(job.prompts[prompt]),
            cache_salt=salt,
            priority=job.priority,
            anew=partial(_anew, job),
        )
        return similar(call, answers, asked, source)
    return source


def _model_of(job: Job) -> tuple[str, str, int, int]:
    """The model as it was loaded: an engine that was started again may have read other files."""
    engine = job.call.server.engine
    pooled = job.call.server.model
    loads = 0 if pooled is None else pooled.num_loads
    return engine.model_name, engine.info.kv_digest, loads, engine.stats().num_restarts


async def _anew(job: Job) -> str | None:
    """A whole answer, made in the time that others leave; ``None`` if it does not end itself."""
    quiet = replace(job, priority=BATCH_PRIORITY, deadline_s=None)
    chunks = [chunk async for _, chunk in _one(quiet, job.prompts[0], job.params, 0)]
    is_whole = chunks[-1].finish_reason in OWN_ENDS
    return "".join(chunk.text for chunk in chunks) if is_whole else None


async def _rest(job: Job, choice: int, state: StreamState) -> AsyncGenerator[Piece, None]:
    """What the client has of a choice, token by token, and what comes after it."""
    (prompt, sample), prior = divmod(choice, job.params.n), state.choice(choice)
    ids, tokens = job.prompts[prompt], tuple(prior.token_ids)
    params = replace(job.params, n=1)
    if tokens:  # with the first of them came what there is to know of the prompt
        params = replace(params, prompt_logprobs=None)
    pieces = text_pieces(tokens, params, job.call.server.engine.tokenizer, ids)
    for count, (token, text) in enumerate(zip(tokens, pieces, strict=True), start=1):
        ends = prior.is_finished and count == len(tokens)
        end = FinishReason.STOP if ends else None
        yield (
            choice,
            PriorChunk(
                request_id=0, index=sample, text=text, token_ids=(token,), finish_reason=end
            ),
        )
    if prior.is_finished:
        return
    source = _one(
        job, ids, params, choice, seed=job.seed_of(prompt), output=tokens, first_sample=sample
    )
    async with contextlib.aclosing(source):
        async for piece in source:
            yield piece


async def _one(
    job: Job,
    prompt: tuple[int, ...],
    params: SamplingParams,
    first: int,
    *,
    seed: int | None = None,
    output: tuple[int, ...] = (),
    first_sample: int = 0,
) -> AsyncGenerator[Piece, None]:
    call = job.call
    request = GenerateRequest(
        request_id=new_id("gen-"),  # clients may use one x-request-id twice at a time
        prompt=prompt,
        params=params,
        seed=seed,
        output_token_ids=output,
        first_sample=first_sample,
        expected_token_ids=job.expected_token_ids,
        adapter=job.adapter,
        cache_salt=salt_of(call.caller.tenant, job.cache_salt),
        tenant=call.caller.tenant,
        priority=job.priority,
        deadline_s=job.deadline_s,
        arrival_s=call.arrival_s,
    )
    source = call.server.engine.generate(request)
    assert isinstance(source, AsyncGenerator)
    async with contextlib.aclosing(source):
        async for chunk in source:
            yield first + chunk.index, chunk


async def _beams(
    job: Job, prompt: tuple[int, ...], params: BeamParams, first: int
) -> AsyncGenerator[Piece, None]:
    """The best beams after a prompt, each in one piece, once the search is over.

    A step of all beams is a request of one token after each. They are charged as they are computed,
    those that are dropped later as well.

    Raises:
        EngineUnavailableError: a step was aborted.
    """
    engine = job.call.server.engine
    search = BeamSearch(prompt, params, engine.eos_token_ids, engine.config.max_model_len)
    begin = end = None
    while search.live:
        steps: dict[int, TokenLogprobs] = {}
        sources = [_one(job, ids, params.of_step, i) for i, ids in enumerate(search.prompts())]
        async with contextlib.aclosing(_merged(sources)) as pieces:
            async for number, chunk in pieces:
                if not chunk.logprobs:
                    if chunk.finish_reason is FinishReason.ABORT:
                        raise EngineUnavailableError("The request was aborted.")
                    yield first, chunk  # an error, for the caller to raise
                    return
                steps[number] = chunk.logprobs[0]
                begin, end = begin or chunk, chunk
        job.call.charge_output(len(steps))
        search.advance([steps[number] for number in range(len(steps))])
    assert begin is not None
    assert end is not None
    for index, beam in enumerate(search.finished):
        yield (
            first + index,
            CompletionChunk(
                request_id=end.request_id,
                index=index,
                text=search.text(
                    beam, engine.tokenizer, skip_special_tokens=job.params.skip_special_tokens
                ),
                token_ids=beam.token_ids,
                logprobs=beam.logprobs,
                finish_reason=finish_reason(search, beam),
                prompt=None if index else begin.prompt,
                timings=None if index else _timings(begin, end, search),
            ),
        )


def _timings(begin: CompletionChunk, end: CompletionChunk, search: BeamSearch) -> RequestTimings:
    """Of a whole search, by the first and the last of its steps, all of which arrived with it."""
    assert begin.timings is not None
    assert end.timings is not None
    count = max(len(beam.token_ids) for beam in search.finished)
    end_s, ttft_s = end.timings.end_to_end_s, begin.timings.ttft_s
    return RequestTimings(
        queue_s=begin.timings.queue_s,
        ttft_s=ttft_s,
        tpot_s=None if ttft_s is None or count < 2 else (end_s - ttft_s) / (count - 1),
        end_to_end_s=end_s,
    )


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """All of them at once, their pieces as they come."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_BUFFERED_CHUNKS)

    async def pump(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for piece in source:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as error:  # raised again by the reader
            await queue.put(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def salt_of(tenant: str, cache_salt: str = "") -> str:
    """What separates the cached prefixes of tenants, and of their own salts."""
    return f"{tenant}\0{cache_salt}"


def priority_of(call: Call, wanted: int | None = None) -> int:
    """The key's priority and the request's; with keys a request cannot raise its own.

    Raises:
        ApiError: the request has one, and the server goes by another order.
    """
    if call.is_batch:
        return BATCH_PRIORITY
    wanted = wanted or 0
    if wanted and call.server.engine.config.scheduling_policy != "priority":
        raise bad_request("priority needs a server with --scheduling-policy priority.", "priority")
    if not call.server.keys.is_open:
        wanted = max(wanted, 0)
    return call.caller.limits.priority + wanted


def stream_identity(job: Job, prefix: str) -> tuple[str, int]:
    """The id of an answer, and when it was created; of a stream that goes on they stay."""
    if job.state is not None:
        return job.state.id, job.state.created
    return new_id(prefix), int(time.time())


def retraction_of(chunk: CompletionChunk) -> Retraction | None:
    """What a chunk takes back, as clients are told."""
    if chunk.retracted is None:
        return None
    start, stop = chunk.retracted
    return Retraction(start=start, stop=stop)


def _details_of(call: Call) -> CompletionTokensDetails | None:
    if not call.replayed_tokens and call.drafted_tokens is None:
        return None
    details = CompletionTokensDetails(cached_tokens=call.replayed_tokens or None)
    if call.drafted_tokens is not None:
        details.accepted_prediction_tokens = call.accepted_tokens
        details.rejected_prediction_tokens = call.drafted_tokens - call.accepted_tokens
    return details


def usage_of(call: Call) -> Usage:
    """The tokens of a call so far, and their cost if the server has a price."""
    return Usage(
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.output_tokens,
        total_tokens=call.prompt_tokens + call.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=call.cached_tokens),
        completion_tokens_details=_details_of(call),
        cost=cost_of(call),
    )
