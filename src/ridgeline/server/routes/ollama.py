"""Ollama's ``/api/chat`` and ``/api/generate``: JSON objects, one a line, and nanoseconds."""

from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from ridgeline.core.request import CompletionChunk, RequestTimings
from ridgeline.server.answers import (
    Answer,
    AnswerDelta,
    AnswerJob,
    answer_pieces,
    arguments_object,
    prepare_answer,
)
from ridgeline.server.context import Call, Server
from ridgeline.server.conversation import ChatInput
from ridgeline.server.errors import bad_request
from ridgeline.server.fim import fim_prompt
from ridgeline.server.logprobs import chat_logprobs
from ridgeline.server.pool.choice import LATEST_TAG
from ridgeline.server.replies import EventStream, Reply, json_lines
from ridgeline.server.routes.chat import conversation_of
from ridgeline.server.routes.completions import prepare_completion
from ridgeline.server.schemas.chat import ChatMessage, ChatRequest, EarlierFunction, MessageToolCall
from ridgeline.server.schemas.completions import CompletionRequest
from ridgeline.server.schemas.generation import JsonSchema, ResponseFormat
from ridgeline.server.schemas.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from ridgeline.text.output import output_parser

_COPIED = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_DONE = {"length": "length", "content_filter": "content_filter"}  # else stop
_NS = 1e9


def model_of(server: Server, name: str) -> str:
    """A model's name as this server has it: Ollama puts ``:latest`` after names without a tag."""
    return name.removesuffix(LATEST_TAG) if name not in server.model_names else name


async def ollama_chat(call: Call, request: OllamaChatRequest) -> Reply | EventStream:
    """Answer a conversation."""
    server = call.server
    if request.asks_nothing:
        return _nothing_asked(call, request, {"message": {"role": "assistant", "content": ""}})
    chat = ChatRequest(
        model=model_of(server, request.model),
        messages=[_message(each, f"messages[{i}]") for i, each in enumerate(request.messages)],
        tools=request.tools,
        **_settings(request),
    )
    answer = await _prepared(call, request, chat, await call.read(conversation_of, chat))
    return await _Run(call, request, answer, _chat_line).answer()


async def ollama_generate(call: Call, request: OllamaGenerateRequest) -> Reply | EventStream:
    """Answer a prompt: as a conversation of one turn, or (``raw``, ``suffix``) by going on."""
    server = call.server
    if request.images:
        raise bad_request("images: this model reads text.", "images")
    if request.context:
        raise bad_request("context is not kept here; send earlier turns to /api/chat.", "context")
    if request.template:
        raise bad_request("template: the model's own is used; with raw there is none.", "template")
    if request.asks_nothing:
        return _nothing_asked(call, request, {"response": ""})
    model = model_of(server, request.model)
    if not (request.raw or request.suffix):
        system = [] if request.system is None else [_text("system", request.system)]
        messages = [*system, _text("user", request.prompt)]
        chat = ChatRequest(model=model, messages=messages, **_settings(request))
        answer = await _prepared(call, request, chat, await call.read(conversation_of, chat))
        return await _Run(call, request, answer, _generate_line).answer()
    if request.think is not None:
        raise bad_request("think has no place in a raw prompt or before a gap.", "think")
    if request.system is not None:
        raise bad_request("system has no place in a raw prompt or before a gap.", "system")
    prompt: str | list[Any] = request.prompt
    if request.suffix:
        prompt = await fim_prompt(server, request.prompt, request.suffix)
    options = _settings(request)
    completion = CompletionRequest(
        model=model,
        prompt=prompt,
        logprobs=_num_logprobs(request),
        **{"max_tokens": server.engine.config.max_model_len} | options,
    )
    served, job = await prepare_completion(call, completion, fits_context=True)

    def new_answer() -> Answer:
        return Answer(
            partial(output_parser, tool_parser=None, reasoning_parser=None, tools=None, prompt="")
        )

    answer = AnswerJob(job=job, model=served, new_answer=new_answer)
    return await _Run(call, request, answer, _generate_line).answer()


_Asked = OllamaChatRequest | OllamaGenerateRequest
_Line = Callable[[AnswerDelta], dict[str, Any]]


async def _prepared(
    call: Call, request: _Asked, chat: ChatRequest, conversation: ChatInput
) -> AnswerJob:
    if request.think and call.server.reasoning_parser is None:
        raise bad_request(f"think: {request.model} does not support thinking.", "think")
    if request.think is not None:
        effort = request.think if isinstance(request.think, str) else None
        conversation.variables["enable_thinking"] = bool(request.think)
        if effort is not None:
            conversation.variables["reasoning_effort"] = effort
    return await prepare_answer(
        call,
        chat,
        conversation,
        max_tokens=chat.max_tokens,
        limit_name=None,  # Ollama's clients ask for more than there is room
        logprobs=_num_logprobs(request),
    )


def _num_logprobs(request: _Asked) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _settings(request: _Asked) -> dict[str, Any]:
    """The fields of our own request that options and format stand for."""
    options = request.options or OllamaOptions()
    found = {name: getattr(options, name) for name in _COPIED}
    found["repetition_penalty"] = options.repeat_penalty
    if found["top_p"] == 0.0:
        found["top_p"] = None
        found["top_k"] = 1
    if options.num_predict is not None and options.num_predict >= 0:
        if options.num_predict == 0:
            raise bad_request("num_predict must not be 0.", "options.num_predict")
        found["max_tokens"] = options.num_predict
    if isinstance(request.format, dict):
        schema = JsonSchema(name="format", schema=request.format)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    elif request.format:
        found["response_format"] = ResponseFormat(type="json_object")
    return {name: value for name, value in found.items() if value is not None}


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        raise bad_request(f"{where}.images: this model reads text.", f"{where}.images")
    calls = [
        MessageToolCall(
            id=each.id,
            function=EarlierFunction(name=each.function.name, arguments=each.function.arguments),
        )
        for each in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=message.content,
        reasoning=message.thinking or None,
        tool_calls=calls or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )


def _text(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def _nothing_asked(call: Call, request: _Asked, empty: dict[str, Any]) -> Reply:
    """A request without input loads a model, or lets it go; the only one of a server stays."""
    model = call.server.check_model(model_of(call.server, request.model), call.caller)
    reason = "unload" if request.keep_alive in (0, "0", "0s") else "load"
    line = {"model": model, "created_at": _now(), **empty, "done": True, "done_reason": reason}
    return Reply(body=line)


def _chat_line(delta: AnswerDelta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": delta.content}
    if delta.reasoning:
        message["thinking"] = delta.reasoning
    if delta.calls:
        message["tool_calls"] = [
            {
                "function": {
                    "index": each.index,
                    "name": each.name,
                    "arguments": arguments_object(each.arguments),
                }
            }
            for each in delta.calls
        ]
    return {"message": message}


def _generate_line(delta: AnswerDelta) -> dict[str, Any]:
    line: dict[str, Any] = {"response": delta.content}
    if delta.reasoning:
        line["thinking"] = delta.reasoning
    return line


class _Run:
    """One request on its way. Calls of tools are whole, and come when the answer is."""

    def __init__(self, call: Call, request: _Asked, answer: AnswerJob, line: _Line) -> None:
        self._call, self._request, self._job, self._line = call, request, answer, line
        self._answer = answer.new_answer()
        self._timings: RequestTimings | None = None
        self._logprobs: list[Any] = []

    async def answer(self) -> Reply | EventStream:
        if self._request.stream:
            return json_lines(self._lines())
        async for _, chunk, _ in answer_pieces(self._job, [self._answer]):
            self._take(chunk)
        line = self._head() | self._line(self._answer.whole) | self._end()
        if self._logprobs:
            line["logprobs"] = self._logprobs
        return Reply(body=line)

    async def _lines(self) -> AsyncGenerator[Any, None]:
        async for _, chunk, added in answer_pieces(self._job, [self._answer]):
            self._take(chunk)
            text = AnswerDelta([part for part in added.parts if part not in added.calls])
            if text.parts:
                line = self._head() | self._line(text) | {"done": False}
                if self._logprobs:
                    line["logprobs"], self._logprobs = self._logprobs, []
                yield line
        calls = AnswerDelta(list(self._answer.whole.calls))
        if calls.parts:
            yield self._head() | self._line(calls) | {"done": False}
        yield self._head() | self._line(AnswerDelta()) | self._end()

    def _take(self, chunk: CompletionChunk) -> None:
        self._timings = chunk.timings or self._timings
        if self._request.logprobs:
            tokenizer = self._call.server.engine.tokenizer
            self._logprobs += [
                msgspec.to_builtins(each) for each in chat_logprobs(tokenizer, chunk.logprobs)
            ]

    def _head(self) -> dict[str, Any]:
        return {"model": self._request.model, "created_at": _now()}

    def _end(self) -> dict[str, Any]:
        """Durations are those of the engine; the model was loaded before."""
        timings = self._timings
        ttft_s = timings.ttft_s if timings is not None and timings.ttft_s is not None else 0.0
        queue_s = timings.queue_s if timings is not None else 0.0
        total_s = timings.end_to_end_s if timings is not None else ttft_s
        retraction = self._answer.retraction
        return ({} if retraction is None else {"retraction": retraction}) | {
            "done": True,
            "done_reason": _DONE.get(self._answer.finish_reason or "", "stop"),
            "total_duration": int(total_s * _NS),
            "load_duration": 0,
            "prompt_eval_count": self._call.prompt_tokens,
            "prompt_eval_duration": int(max(0.0, ttft_s - queue_s) * _NS),
            "eval_count": self._call.output_tokens,
            "eval_duration": int(max(0.0, total_s - ttft_s) * _NS),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
