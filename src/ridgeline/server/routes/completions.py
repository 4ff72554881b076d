"""``/v1/completions``."""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.core.request import CompletionChunk
from ridgeline.core.result import TokenLogprobs
from ridgeline.server.beams import beam_params, refused_in_beams
from ridgeline.server.cached_content import cached_content, check_prompts
from ridgeline.server.context import Call, Server
from ridgeline.server.continuation import PriorChunk
from ridgeline.server.errors import bad_request
from ridgeline.server.fim import fim_prompt
from ridgeline.server.generation import (
    Job,
    generate,
    priority_of,
    retraction_of,
    stream_identity,
    usage_of,
)
from ridgeline.server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from ridgeline.server.output_formats import wanted_format
from ridgeline.server.prompts import (
    check_room,
    count_prompts,
    expected_tokens,
    split_prompts,
    tokenize,
    truncate,
)
from ridgeline.server.replies import DONE, EventStream, Reply, event
from ridgeline.server.sampling import (
    UNLIMITED_TOKENS,
    check_stream_options,
    deadline_s,
    limit_name,
    max_tokens_of,
    sampling_params,
)
from ridgeline.server.schemas.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from ridgeline.server.schemas.generation import Usage

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(call: Call, request: CompletionRequest) -> Reply | EventStream:
    """Continue one or several prompts."""
    model, job = await prepare_completion(call, request)
    run = _Run(call, request, model, job)
    if request.stream:
        return EventStream(events=run.events())
    return Reply(body=await run.response())


async def prepare_completion(
    call: Call, request: CompletionRequest, *, fits_context: bool = False
) -> tuple[str, Job]:
    """Check and admit a request, and tokenize its prompts; returns the model's name as well.

    With ``fits_context`` an output limit beyond the context's end is that end.

    Raises:
        ApiError, RequestError: what the caller did wrong.
    """
    server = call.server
    model = server.check_model(request.model, call.caller)
    check_stream_options(request)
    drawn = _num_drawn(request)
    context = server.engine.config.max_model_len
    max_tokens = max_tokens_of(request)
    if max_tokens is None and UNLIMITED_TOKENS in (request.max_tokens, request.n_predict):
        max_tokens, fits_context = context, True
    if max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens may be 0 only with echo.", "max_tokens")
    output_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max(max_tokens, 1)
    beams = beam_params(server, request, max_tokens=output_tokens, logprobs=request.logprobs)
    if beams is not None:
        _check_beams(request)
    call.admit(num_outputs=count_prompts(request.prompt) * drawn, max_tokens=output_tokens)
    prefix = cached_content(call, request, model)
    if prefix is not None and request.echo:
        raise bad_request("echo has no part in a prompt with cached_content.", "echo")
    prompt = request.prompt if prefix is None else prefix.before_prompt(request.prompt)
    if request.suffix:
        if not isinstance(prompt, str):
            raise bad_request("suffix needs a prompt that is one text.", "suffix")
        prompt = await fim_prompt(server, prompt, request.suffix)
    room = (None, None) if fits_context else (output_tokens, max_tokens)
    prompts = await _prompt_ids(server, request, prompt, *room)
    wanted = wanted_format(request)
    asked = request.prompt_logprobs
    echoed = request.logprobs if request.echo else None
    priority = priority_of(call, request.priority)
    if prefix is not None:
        await check_prompts(call, prefix, prompts, priority)
    job = Job(
        call=call,
        prompts=prompts,
        params=sampling_params(
            server,
            request,
            max_tokens=output_tokens,
            structured=None if wanted is None else wanted.grammar,
            n=drawn,
            logprobs=request.logprobs if drawn == (request.n or 1) else request.logprobs or 0,
            prompt_logprobs=echoed if asked is None else max(asked, echoed or 0),
        ),
        adapter=server.adapter(model),
        cache_salt=prefix.cache_salt if prefix is not None else request.cache_salt or "",
        priority=priority,
        deadline_s=deadline_s(server, request),
        format_fields=() if wanted is None else (wanted.field,),
        beams=beams,
        expected_token_ids=await expected_tokens(call, request.prediction),
    )
    return model, job


def _num_drawn(request: CompletionRequest) -> int:
    """Samples of each prompt, of which n are given out."""
    count = request.n or 1
    drawn = count if request.best_of is None else request.best_of
    if drawn < count:
        raise bad_request("best_of must be at least n.", "best_of")
    if drawn > count and request.stream:
        raise bad_request("best_of above n cannot be streamed.", "best_of")
    return drawn


async def _prompt_ids(
    server: Server,
    request: CompletionRequest,
    prompt: str | list[Any],
    output_tokens: int | None,
    max_tokens: int | None,
) -> list[tuple[int, ...]]:
    """Each prompt's tokens, cut as the request says, with room for ``output_tokens`` or else one,
    and for an output limit that was asked for."""
    context, limit = server.engine.config.max_model_len, request.truncate_prompt_tokens
    adds_special = request.add_special_tokens is not False
    prompts = [
        truncate(ids, limit, context, output_tokens)
        for ids in await tokenize(
            server, prompt, add_special_tokens=adds_special, is_cut=limit is not None
        )
    ]
    for ids in prompts:
        check_room(ids, max_tokens, context, limit_name(request))
    return prompts


class _Run:
    """One request on its way; choices are numbered prompt · n + sample."""

    def __init__(self, call: Call, request: CompletionRequest, model: str, job: Job) -> None:
        self._call, self._request, self._model, self._job = call, request, model, job
        self._echoes = _echoes(call, request, job)
        self._id, self._created = stream_identity(job, "cmpl-")
        self._hides_output = request.max_tokens == 0 or request.max_completion_tokens == 0
        tokenizer = call.server.engine.tokenizer
        count = len(job.prompts) * job.params.n
        self._writers = [CompletionLogprobsWriter(tokenizer) for _ in range(count)]
        self._begun = [False] * count
        # What the prompt's report says concerns all n samples, and comes with the first chunk.
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None] | None] = {}

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._request.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = wants_usage and options is not None and bool(options.continuous_usage_stats)
        routed = None if self._job.beams else self._call.routed
        async for choice, chunk in generate(self._job):
            part = self._choice(choice, chunk)
            if isinstance(chunk, PriorChunk):
                continue
            if routed is not None:
                routed.note(choice, chunk.token_ids)
            if part.text or part.finish_reason or chunk.token_ids:
                data = event(self._chunk([part], usage_of(self._call) if continuous else None))
                yield data if routed is None else routed.marked(data)
        usage = event(self._chunk([], self._usage())) if wants_usage else b""
        yield usage + DONE

    async def response(self) -> CompletionResponse:
        parts: list[list[CompletionChoice]] = [[] for _ in self._begun]
        logprobs: list[list[float]] = [[] for _ in self._begun]
        async for choice, chunk in generate(self._job):
            parts[choice].append(self._choice(choice, chunk))
            logprobs[choice] += [entry.logprob for entry in chunk.logprobs]
        choices = self._best([_joined(each) for each in parts], logprobs)
        return self._chunk(choices, self._usage())

    def _best(
        self, choices: list[CompletionChoice], logprobs: Sequence[Sequence[float]]
    ) -> list[CompletionChoice]:
        """Of each prompt's samples the n with the highest mean log-probability, best first."""
        drawn, wanted = self._job.params.n, self._request.n or 1
        if drawn == wanted:
            return choices
        best: list[CompletionChoice] = []
        for first in range(0, len(choices), drawn):
            ranked = sorted(
                range(first, first + drawn),
                key=lambda index: _cost(logprobs[index]),
            )
            for index in ranked[:wanted]:
                best.append(msgspec.structs.replace(choices[index], index=len(best)))
        return best

    def _usage(self) -> Usage:
        if self._hides_output:
            self._call.output_tokens = 0
        return usage_of(self._call)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, choice: int, chunk: CompletionChunk) -> CompletionChoice:
        """What a chunk adds to a choice; the first of them also has the echo."""
        request = self._request
        prompt = choice // self._job.params.n
        if chunk.prompt is not None:
            self._prompt_logprobs[prompt] = chunk.prompt.logprobs
        is_first, self._begun[choice] = not self._begun[choice], True
        text = "" if self._hides_output else chunk.text
        if text and not isinstance(chunk, PriorChunk):
            self._call.publish()
        token_ids = () if self._hides_output else chunk.token_ids
        entries: Sequence[TokenLogprobs | None] = () if self._hides_output else chunk.logprobs
        write = self._writers[choice].write
        logprobs: list[CompletionLogprobs] = []
        if is_first and request.echo:
            echo, ids = self._echoes[prompt], self._job.prompts[prompt]
            text = echo.text + text
            if request.logprobs is not None:
                of_prompt = self._prompt_logprobs.get(prompt) or ()
                logprobs.append(write(ids, of_prompt, hides_special=echo.hides_special))
        if request.logprobs is not None and token_ids:
            hides = self._job.params.skip_special_tokens
            logprobs.append(write(token_ids, entries, hides_special=hides))
        wants_ids = bool(request.return_token_ids)
        return CompletionChoice(
            index=choice,
            text=text,
            logprobs=_joined_logprobs(logprobs) if logprobs else None,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=list(token_ids) if wants_ids else None,
            prompt_token_ids=(list(self._job.prompts[prompt]) if wants_ids and is_first else None),
            prompt_logprobs=(
                prompt_logprobs(
                    self._call.server.engine.tokenizer, self._prompt_logprobs.get(prompt)
                )
                if is_first and request.prompt_logprobs is not None
                else None
            ),
            retraction=retraction_of(chunk),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Echo:
    """A prompt as text: as it was sent, which hides the special tokens added to it, or decoded."""

    text: str
    hides_special: bool


def _check_beams(request: CompletionRequest) -> None:
    """Refuse what only completions have and beams have not."""
    if request.best_of is not None:
        raise refused_in_beams("best_of")
    if request.echo and request.logprobs is not None:
        raise bad_request("echo with logprobs has no part in a beam search.", "echo")


def _echoes(call: Call, request: CompletionRequest, job: Job) -> list[_Echo]:
    if not request.echo:
        return []
    tokenizer = call.server.tokenizer
    echoes = []
    is_whole = request.truncate_prompt_tokens is None
    sent = split_prompts(request.prompt, "prompt") if is_whole else job.prompts
    for prompt, ids in zip(sent, job.prompts, strict=True):
        if isinstance(prompt, str):
            adds_special = request.add_special_tokens is not False
            echoes.append(_Echo(text=prompt, hides_special=adds_special))
        else:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            echoes.append(_Echo(text=text, hides_special=False))
    return echoes


def _cost(logprobs: Sequence[float]) -> float:
    """Minus the mean; without tokens, of which a guard may have let out none, it is the highest."""
    return -sum(logprobs) / len(logprobs) if logprobs else math.inf


def _joined(parts: list[CompletionChoice]) -> CompletionChoice:
    """One choice of all its parts."""
    first, last = parts[0], parts[-1]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return CompletionChoice(
        index=first.index,
        text="".join(part.text for part in parts),
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=(
            None
            if first.token_ids is None
            else [token for part in parts for token in part.token_ids or ()]
        ),
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
    )


def _joined_logprobs(parts: list[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[value for part in parts for value in part.top_logprobs or ()],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )
