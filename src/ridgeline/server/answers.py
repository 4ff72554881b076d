"""Answers to conversations: the prompt, and what the output means while it streams."""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import CompletionChunk, FinishReason
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.engine.beam_search import BeamParams
from ridgeline.server.beams import refused_in_beams
from ridgeline.server.cached_content import cached_content, check_prompts
from ridgeline.server.call_ids import new_call_id, with_template_ids
from ridgeline.server.context import Call, Server
from ridgeline.server.continuation import PriorChunk
from ridgeline.server.conversation import ChatInput, explain_tools
from ridgeline.server.forced_calls import forced_call
from ridgeline.server.generation import Job, generate, priority_of
from ridgeline.server.output_formats import FormatSchema, refused_format, wanted_format
from ridgeline.server.prompts import check_room, expected_tokens, render, tokenize, truncate
from ridgeline.server.sampling import deadline_s, sampling_params
from ridgeline.server.schemas.generation import Generation, PredictedOutput, Retraction
from ridgeline.server.semantic.answers import UserQuestion, question_of
from ridgeline.text.output import (
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolArguments,
    ToolCall,
    output_parser,
    reads_special_tokens,
)


@dataclass(slots=True, kw_only=True)
class CallDelta:
    """What a piece adds to a call; ``id`` and ``name`` are in its first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Content | Reasoning | CallDelta


@dataclass(slots=True)
class AnswerDelta:
    """What a piece of the output adds to an answer, in the order in which it was written."""

    parts: list[Part] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Append a part, or lengthen the last one where it goes on."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, CallDelta):
            if part.id is None and isinstance(last, CallDelta) and last.index == part.index:
                last.arguments += part.arguments
            else:
                self.parts.append(replace(part))
        elif isinstance(last, type(part)):
            self.parts[-1] = type(part)(last.text + part.text)
        else:
            self.parts.append(part)

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if isinstance(part, CallDelta)]


class Answer:
    """One answer in the making: collects it whole, and says what each piece adds.

    With ``one_call`` it ends where a second call begins, whatever the model writes then; ``is_cut``
    says that it did. What a guard takes back (``retraction``) is not in the ``whole`` any more.
    """

    def __init__(self, new_parser: Callable[[], OutputParser], *, one_call: bool = False) -> None:
        self._new_parser = new_parser
        self._parser = new_parser()
        self._one_call = one_call
        self._texts: list[str] = []
        self.is_cut = False
        self.retraction: Retraction | None = None
        self.whole = AnswerDelta()
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def take(self, chunk: CompletionChunk) -> AnswerDelta:
        """Read a chunk of the output."""
        self._texts.append(chunk.text)
        events = self._parser.push(chunk.text) if chunk.text else []
        self.num_tokens += len(chunk.token_ids)
        if any(isinstance(event, Reasoning) for event in events):
            self.num_reasoning_tokens = self.num_tokens
        if chunk.finish_reason is not None:
            events = events + self._parser.finish()
        delta = self._delta(events)
        if self.is_cut:
            self.finish_reason = "tool_calls"
        elif chunk.finish_reason is not None:
            is_call = bool(self.whole.calls) and chunk.finish_reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if is_call else str(chunk.finish_reason)
            self.stop_reason = chunk.stop_reason
        if chunk.retracted is not None:
            delta = AnswerDelta()
            self._retract(*chunk.retracted)
        return delta

    def _retract(self, start: int, stop: int) -> None:
        """Read the text once more, without these characters of it."""
        text = "".join(self._texts)
        parser, ids = self._new_parser(), [call.id for call in self.whole.calls if call.id]
        self.whole = AnswerDelta()
        self._delta([*parser.push(text[:start] + text[stop:]), *parser.finish()])
        for call, known in zip(self.whole.calls, ids, strict=False):
            call.id = known
        self.retraction = Retraction(start=start, stop=stop, content=self.whole.content)

    def _delta(self, events: list[Event]) -> AnswerDelta:
        delta = AnswerDelta()
        for event in events:
            if isinstance(event, ToolCall):
                if self._one_call and self.whole.calls:
                    self.is_cut = True
                    break
                part: Part = CallDelta(index=event.index, id=new_call_id(), name=event.name)
            elif isinstance(event, ToolArguments):
                part = CallDelta(index=event.index, arguments=event.text)
            else:
                part = event
            delta.add(part)
            self.whole.add(part)
        return delta


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerJob:
    """A conversation on its way through the engine; `new_answer` once for each of the n."""

    job: Job
    model: str
    new_answer: Callable[[], Answer]


Piece = tuple[int, CompletionChunk, AnswerDelta]


async def answer_pieces(job: AnswerJob, answers: Sequence[Answer]) -> AsyncGenerator[Piece, None]:
    """Chunks of the outputs, each with its index and what it adds to that answer.

    What comes after the cut of the last open answer is not generated.

    Raises:
        ApiError, RequestError: what the caller did wrong.
    """
    async with contextlib.aclosing(generate(job.job)) as pieces:
        async for index, chunk in pieces:
            answer = answers[index]
            if answer.is_cut:
                continue
            delta = answer.take(chunk)
            if delta.content and not isinstance(chunk, PriorChunk):
                job.job.call.publish()
            yield index, chunk, delta
            if answer.is_cut and all(each.finish_reason is not None for each in answers):
                job.job.call.is_complete = True
                return


async def prepare_answer(
    call: Call,
    fields: Generation,
    conversation: ChatInput,
    *,
    max_tokens: int | None,
    limit_name: str | None,
    format_schema: FormatSchema | None = None,
    add_special_tokens: bool = False,
    beams: BeamParams | None = None,
    prediction: PredictedOutput | None = None,
    **settings: Any,
) -> AnswerJob:
    """Admit and check a request and render its prompt; ``settings`` go to the sampling parameters.

    ``limit_name``: how the request calls ``max_tokens``, which must then fit into the context;
    without it the context may end the output first.

    Raises:
        ApiError, RequestError: what the caller did wrong.
    """
    server = call.server
    model = server.check_model(fields.model, call.caller)
    call.admit(num_outputs=settings.get("n") or 1, max_tokens=max_tokens)
    prefix = cached_content(call, fields, model)
    if prefix is not None:
        conversation = prefix.before(conversation)
    form = _output_form(server, fields, conversation, format_schema)
    if beams is not None and form.grammar is not None:
        raise refused_in_beams("tool_choice")
    prompt = await prompt_of(call, conversation)
    if form.is_forced or reads_special_tokens(form.tool_parser, form.reasoning_parser):
        settings["skip_special_tokens"] = False
    params = sampling_params(
        server,
        fields,
        max_tokens=max_tokens,
        structured=form.grammar,
        **settings,
    )
    ids = await _prompt_ids(
        call, fields, prompt, max_tokens, limit_name, add_special_tokens=add_special_tokens
    )
    priority = priority_of(call, fields.priority)
    if prefix is not None:
        await check_prompts(call, prefix, [ids], priority)
    job = Job(
        call=call,
        prompts=[ids],
        params=params,
        adapter=server.adapter(model),
        cache_salt=prefix.cache_salt if prefix is not None else fields.cache_salt or "",
        priority=priority,
        deadline_s=deadline_s(server, fields),
        format_fields=form.fields,
        beams=beams,
        question=_question(call, conversation, params),
        expected_token_ids=await expected_tokens(call, prediction),
    )
    return AnswerJob(job=job, model=model, new_answer=_new_answer(form, conversation, prompt))


async def _prompt_ids(
    call: Call,
    fields: Generation,
    prompt: str,
    max_tokens: int | None,
    limit_name: str | None,
    *,
    add_special_tokens: bool,
) -> tuple[int, ...]:
    """The prompt's tokens, cut as the request says, with room for the output behind them."""
    server, limit = call.server, fields.truncate_prompt_tokens
    context = server.engine.config.max_model_len
    (ids,) = await tokenize(
        server,
        prompt,
        add_special_tokens=add_special_tokens,
        param=call.prompt_field,
        is_cut=limit is not None,
    )
    ids = truncate(ids, limit, context, max_tokens)
    if limit_name is not None:
        check_room(ids, max_tokens, context, limit_name)
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputForm:
    """What an output is held to, by which ``fields`` of the request, and how it is read."""

    grammar: StructuredOutputs | None = None
    fields: tuple[str, ...] = ()
    is_forced: bool = False  # to be a call
    tool_parser: str | None = None
    reasoning_parser: str | None = None


def _new_answer(form: _OutputForm, conversation: ChatInput, prompt: str) -> Callable[[], Answer]:
    """Makes what reads an output."""
    parser = partial(
        output_parser,
        tool_parser=form.tool_parser,
        reasoning_parser=form.reasoning_parser,
        tools={tool.name: tool.parameters or {} for tool in conversation.offered_tools},
        prompt=prompt,
        continued=conversation.continued_text,
    )
    return lambda: Answer(parser, one_call=not conversation.parallel_calls)


def _output_form(
    server: Server, fields: Generation, conversation: ChatInput, schema: FormatSchema | None
) -> _OutputForm:
    """A forced call, a format, or what the model says by itself."""
    wanted = wanted_format(fields, schema)
    grammar = None if wanted is None else wanted.grammar
    named = () if wanted is None else (wanted.field,)
    try:
        forced = forced_call(conversation, grammar, server.tool_parser, server.template_source)
    except InvalidRequestError as error:
        raise refused_format(error, ("tools", *named)) from None
    if forced is not None:
        return _OutputForm(
            grammar=forced.grammar,
            fields=("tools", *named),
            is_forced=True,
            tool_parser=forced.parser,
        )
    if wanted is not None:
        return _OutputForm(grammar=grammar, fields=named)
    return _OutputForm(
        tool_parser=server.tool_parser if conversation.offered_tools else None,
        reasoning_parser=server.reasoning_parser,
    )


def _question(call: Call, conversation: ChatInput, params: SamplingParams) -> UserQuestion | None:
    """What is asked, where a similar question's answer may stand in for this one's."""
    is_plain = params.n == 1 and params.logprobs is None and params.prompt_logprobs is None
    if call.server.similar is None or not is_plain or params.structured_outputs is not None:
        return None
    return question_of(conversation)


async def prompt_of(call: Call, conversation: ChatInput) -> str:
    """The rendered prompt; tools are put into words if the template knows none."""
    server = call.server
    source = server.template_source
    tools = conversation.told_tools
    knows_tools = server.template_knows_tools
    must_explain = not knows_tools and (tools or "tool_calls" not in source)

    def messages() -> list[dict[str, Any]]:
        found = with_template_ids(conversation.messages, source)
        return explain_tools(found, tools) if must_explain else found

    return await render(
        server,
        await call.read(messages),
        param=call.prompt_field,
        tools=[tool.as_template_input() for tool in tools] if tools and knows_tools else None,
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=conversation.variables,
    )


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as an object; those that were cut short or are none are left as text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"_raw": text}
    return value if isinstance(value, dict) else {"_raw": text}
