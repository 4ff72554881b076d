"""``/v1/chat/completions``."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ridgeline.core.request import CompletionChunk, PromptReport
from ridgeline.server.answers import (
    Answer,
    AnswerDelta,
    AnswerJob,
    answer_pieces,
    prepare_answer,
)
from ridgeline.server.beams import beam_params
from ridgeline.server.context import Call
from ridgeline.server.continuation import PriorChunk
from ridgeline.server.conversation import ChatInput, Choice, ToolSpec, call_input
from ridgeline.server.errors import bad_request
from ridgeline.server.generation import stream_identity, usage_of
from ridgeline.server.logprobs import chat_logprobs, prompt_logprobs
from ridgeline.server.replies import DONE, EventStream, Reply, event
from ridgeline.server.sampling import check_stream_options, limit_name, max_tokens_of
from ridgeline.server.schemas.chat import (
    AllowedToolsChoice,
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChosenLogprob,
    ChunkChoice,
    ContentPart,
    Delta,
    FunctionDelta,
    NamedToolChoice,
    Tool,
    ToolCallDelta,
    ToolCallOut,
)
from ridgeline.server.schemas.generation import CompletionTokensDetails, Usage
from ridgeline.server.text_files import text_of_file

_TEXT_PARTS = ("text", "input_text", "output_text")


async def chat(call: Call, request: ChatRequest) -> Reply | EventStream:
    """Answer a conversation."""
    check_stream_options(request)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs.", "top_logprobs")
    if max_tokens_of(request) == 0:
        raise bad_request("max_tokens must be at least 1.", "max_tokens")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not available in a stream.", "prompt_logprobs")
    max_tokens, logprobs = max_tokens_of(request), None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    answer = await prepare_answer(
        call,
        request,
        await call.read(conversation_of, request),
        max_tokens=max_tokens,
        limit_name=limit_name(request),
        add_special_tokens=bool(request.add_special_tokens),
        beams=beam_params(call.server, request, max_tokens=max_tokens, logprobs=logprobs),
        prediction=request.prediction,
        n=request.n,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    run = _Run(call, request, answer)
    if request.stream:
        return EventStream(events=run.events())
    return Reply(body=await run.response())


def conversation_of(request: ChatRequest) -> ChatInput:
    """The request's messages and tools as templates take them."""
    choice, allowed = _tool_choice(request)
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        effort = request.reasoning_effort
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | variables
    add_prompt = request.add_generation_prompt
    continues = bool(request.continue_final_message)
    return ChatInput(
        messages=message_inputs(request.messages),
        tools=tool_specs(request.tools),
        choice=choice,
        allowed=allowed,
        parallel_calls=request.parallel_tool_calls is not False,
        documents=request.documents,
        variables=variables,
        add_generation_prompt=not continues if add_prompt is None else add_prompt,
        continue_final_message=continues,
    )


def _tool_choice(request: ChatRequest) -> tuple[Choice, tuple[str, ...] | None]:
    """What must be called, and which tools may be; ``None`` is all."""
    match request.tool_choice:
        case NamedToolChoice(function=function):
            return "required", (function.name,)
        case AllowedToolsChoice(allowed_tools=some):
            return some.mode, tuple(tool.function.name for tool in some.tools)
        case choice:
            return choice or "auto", None


def tool_specs(tools: list[Tool] | None) -> tuple[ToolSpec, ...]:
    """Tools as every interface has them."""
    functions = [tool.function for tool in tools or ()]
    return tuple(
        ToolSpec(name=f.name, description=f.description, parameters=f.parameters) for f in functions
    )


def message_inputs(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates take them."""
    return [_message_input(each, f"messages[{i}]") for i, each in enumerate(messages)]


def _message_input(message: ChatMessage, where: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role}
    content = message.content
    if isinstance(content, list):
        result["content"] = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None or not message.tool_calls:
        result["content"] = message.refusal or "" if content is None else content
    if (reasoning := message.reasoning or message.reasoning_content) is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            call_input(each.id, each.function.name, each.function.arguments)
            for each in message.tool_calls
        ]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    return result


def _part(part: ContentPart, where: str) -> dict[str, Any]:
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "text", "text": part.refusal}
    if part.type == "file":
        return {"type": "text", "text": text_of_file(part.file, where)}
    if part.type not in _TEXT_PARTS:
        raise bad_request(f"{where}: this model reads text, not {part.type!r}.", where)
    if part.text is None:
        raise bad_request(f"{where}: a text part has no text.", where)
    return {"type": "text", "text": part.text}


class _Run:
    """One request on its way."""

    def __init__(self, call: Call, request: ChatRequest, answer: AnswerJob) -> None:
        self._call, self._request, self._answer = call, request, answer
        self._id, self._created = stream_identity(answer.job, "chatcmpl-")
        self._answers = [answer.new_answer() for _ in range(answer.job.params.n)]
        self._logprobs: list[list[ChosenLogprob]] = [[] for _ in self._answers]
        self._token_ids: list[list[int]] = [[] for _ in self._answers]
        self._report: PromptReport | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._request.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = wants_usage and options is not None and bool(options.continuous_usage_stats)
        begun = [False] * len(self._answers)
        prompt = self._shown_prompt()
        routed = None if self._answer.job.beams else self._call.routed
        async for index, chunk, delta in answer_pieces(self._answer, self._answers):
            if isinstance(chunk, PriorChunk):
                begun[index], prompt = True, None
                continue
            if routed is not None:
                routed.note(index, chunk.token_ids)
            if begun[index] and not delta.parts and not self._is_shown(index, chunk):
                continue
            choice = self._chunk_choice(index, chunk, delta, is_first=not begun[index])
            begun[index] = True
            data = event(self._chunk([choice], self._usage() if continuous else None, prompt))
            yield data if routed is None else routed.marked(data)
            prompt = None
        usage = event(self._chunk([], self._usage())) if wants_usage else b""
        yield usage + DONE

    async def response(self) -> ChatResponse:
        async for index, chunk, _ in answer_pieces(self._answer, self._answers):
            self._report = self._report or chunk.prompt
            self._logprobs[index] += self._entries(chunk)
            self._token_ids[index] += chunk.token_ids
        tokenizer = self._call.server.engine.tokenizer
        return ChatResponse(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._answer.model,
            choices=[self._choice(index, each) for index, each in enumerate(self._answers)],
            usage=self._usage(),
            prompt_token_ids=self._shown_prompt(),
            prompt_logprobs=(
                prompt_logprobs(tokenizer, self._report.logprobs) if self._report else None
            ),
        )

    def _is_shown(self, index: int, chunk: CompletionChunk) -> bool:
        """Whether a chunk that adds no text is an event all the same."""
        has_ids = bool(chunk.token_ids) and bool(self._request.return_token_ids)
        ends = self._answers[index].finish_reason is not None
        return has_ids or bool(chunk.logprobs) or ends

    def _shown_prompt(self) -> list[int] | None:
        return list(self._answer.job.prompts[0]) if self._request.return_token_ids else None

    def _entries(self, chunk: CompletionChunk) -> list[ChosenLogprob]:
        if not self._request.logprobs:
            return []
        return chat_logprobs(self._call.server.engine.tokenizer, chunk.logprobs)

    def _usage(self) -> Usage:
        usage = usage_of(self._call)
        if reasoning := sum(answer.num_reasoning_tokens for answer in self._answers):
            details = usage.completion_tokens_details or CompletionTokensDetails()
            details.reasoning_tokens = reasoning
            usage.completion_tokens_details = details
        return usage

    def _chunk(
        self, choices: list[ChunkChoice], usage: Usage | None, prompt: list[int] | None = None
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._answer.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt,
        )

    def _chunk_choice(
        self, index: int, chunk: CompletionChunk, delta: AnswerDelta, *, is_first: bool
    ) -> ChunkChoice:
        entries = self._entries(chunk)
        reasoning = None
        if delta.reasoning and self._request.include_reasoning is not False:
            reasoning = delta.reasoning
        has_content = delta.content or (is_first and not reasoning and not delta.calls)
        return ChunkChoice(
            index=index,
            delta=Delta(
                role="assistant" if is_first else None,
                content=delta.content if has_content else None,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=_call_deltas(delta) or None,
            ),
            logprobs=ChatLogprobs(content=entries) if entries else None,
            finish_reason=self._answers[index].finish_reason,
            stop_reason=self._answers[index].stop_reason,
            token_ids=list(chunk.token_ids) if self._request.return_token_ids else None,
            retraction=self._answers[index].retraction,
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        whole = answer.whole
        shows_reasoning = whole.reasoning and self._request.include_reasoning is not False
        reasoning = whole.reasoning if shows_reasoning else None
        calls = [
            ToolCallOut(
                id=call.id or "",
                function=CalledFunction(name=call.name or "", arguments=call.arguments),
            )
            for call in whole.calls
        ]
        return ChatChoice(
            index=index,
            message=AnswerMessage(
                role="assistant",
                content=whole.content or (None if calls else ""),
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or None,
            ),
            logprobs=(
                ChatLogprobs(content=self._logprobs[index]) if self._request.logprobs else None
            ),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=self._token_ids[index] if self._request.return_token_ids else None,
        )


def _call_deltas(delta: AnswerDelta) -> list[ToolCallDelta]:
    return [
        ToolCallDelta(
            index=call.index,
            id=call.id,
            type="function" if call.id else None,
            function=FunctionDelta(name=call.name, arguments=call.arguments),
        )
        for call in delta.calls
    ]
