"""Running the prompts of one call on the engine."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import InvalidRequestError, NoTokenError, OverloadedError
from ridgeline.core.request import CompletionChunk, FinishReason, GenerateRequest
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.server.context import Call, new_id
from ridgeline.server.cost import cost_of
from ridgeline.server.errors import bad_request
from ridgeline.server.output_formats import refused_format
from ridgeline.server.schemas.generation import PromptTokensDetails, Usage

MAX_SEQUENCES = 2048
BATCH_PRIORITY = 1 << 30  # after everything that somebody waits for
_BUFFERED_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The prompts of a call as token ids, and how to continue them.

    ``format_fields``: those of the request from which the grammar of the output was made.
    """

    call: Call
    prompts: Sequence[tuple[int, ...]]
    params: SamplingParams
    adapter: str | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    format_fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.prompts) * self.params.n > MAX_SEQUENCES:
            raise bad_request(
                f"A request may ask for {MAX_SEQUENCES} outputs at the most, over all prompts.", "n"
            )


Piece = tuple[int, CompletionChunk]


async def generate(job: Job) -> AsyncGenerator[Piece, None]:
    """Pieces of the outputs, each with the index of its choice: prompt · n + sample.

    Closing it aborts what is left. Its end is that of the call's admission.

    Raises:
        ApiError: the grammar of the output was refused.
        NoTokenError: an output ended in an error.
    """
    call, server = job.call, job.call.server
    with call.admission:
        call.charge_input(sum(map(len, job.prompts)))
        meter = server.metrics.meter(call)
        source = _one(job, 0) if len(job.prompts) == 1 else _merged(job)
        try:
            async for choice, chunk in source:
                if chunk.prompt is not None:
                    call.prompt_tokens += chunk.prompt.num_tokens
                    call.cached_tokens += chunk.prompt.num_cached_tokens
                call.output_tokens += len(chunk.token_ids)
                call.charge_output(len(chunk.token_ids))
                meter.take(choice, chunk)
                if chunk.finish_reason is FinishReason.ERROR:
                    raise NoTokenError
                if chunk.finish_reason is FinishReason.SHED:
                    raise OverloadedError(
                        "The queue is full of more urgent requests.", retry_after_s=1.0
                    )
                yield choice, chunk
            call.is_complete = True
        except InvalidRequestError as error:
            raise refused_format(error, job.format_fields) from None
        finally:
            cost = cost_of(call)
            meter.close(None if cost is None else cost.total)
            call.ttft_s = meter.ttft_s
            await source.aclose()


async def _one(job: Job, prompt: int) -> AsyncGenerator[Piece, None]:
    call = job.call
    request = GenerateRequest(
        request_id=new_id("gen-"),  # clients may use one x-request-id twice at a time
        prompt=job.prompts[prompt],
        params=job.params,
        adapter=job.adapter,
        cache_salt=f"{call.caller.tenant}\0{job.cache_salt}",
        tenant=call.caller.tenant,
        priority=job.priority,
        deadline_s=job.deadline_s,
        arrival_s=call.arrival_s,
    )
    first = prompt * job.params.n
    source = call.server.engine.generate(request)
    assert isinstance(source, AsyncGenerator)
    async with contextlib.aclosing(source):
        async for chunk in source:
            yield first + chunk.index, chunk


async def _merged(job: Job) -> AsyncGenerator[Piece, None]:
    """All prompts at once, their pieces as they come."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_BUFFERED_CHUNKS)

    async def pump(prompt: int) -> None:
        try:
            async for piece in _one(job, prompt):
                await queue.put(piece)
            await queue.put(None)
        except Exception as error:  # raised again by the reader
            await queue.put(error)

    tasks = [asyncio.create_task(pump(prompt)) for prompt in range(len(job.prompts))]
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


def usage_of(call: Call) -> Usage:
    """The tokens of a call so far, and their cost if the server has a price."""
    return Usage(
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.output_tokens,
        total_tokens=call.prompt_tokens + call.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=call.cached_tokens),
        cost=cost_of(call),
    )
