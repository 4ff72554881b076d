"""``/v1/responses``: one answer; what is kept of it, where the server keeps any."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from ridgeline.core.request import CompletionChunk
from ridgeline.server.answers import (
    Answer,
    AnswerDelta,
    AnswerJob,
    CallDelta,
    answer_pieces,
    prepare_answer,
    prompt_of,
)
from ridgeline.server.context import Call
from ridgeline.server.conversation import ChatInput, Choice, ToolSpec, call_input
from ridgeline.server.errors import bad_request
from ridgeline.server.generation import usage_of
from ridgeline.server.ids import new_id
from ridgeline.server.jobs.responses import KeptResponse
from ridgeline.server.logprobs import chat_logprobs
from ridgeline.server.output_formats import FormatSchema
from ridgeline.server.prompts import tokenize
from ridgeline.server.replies import EventStream, Reply, event
from ridgeline.server.response_items import OutputItem
from ridgeline.server.routes.paging import page_limit, page_of
from ridgeline.server.schemas.chat import ChosenLogprob
from ridgeline.server.schemas.responses import (
    InputItem,
    ResponsesAllowedTools,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
)
from ridgeline.server.text_files import text_of_file
from ridgeline.text.output import Content, Reasoning

_INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")
_TEXT_PARTS = ("input_text", "output_text", "text")
_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
Events = list[tuple[str, dict[str, Any]]]  # names and fields


async def responses(call: Call, request: ResponsesRequest) -> Reply | EventStream:
    """Answer an input."""
    _check(request, keeps=call.server.config.keep_responses_s is not None)
    earlier = await _earlier(call, request)
    includes_logprobs = "message.output_text.logprobs" in (request.include or ())
    wants_logprobs = includes_logprobs or bool(request.top_logprobs)
    answer = await prepare_answer(
        call,
        request,
        await call.read(_conversation, request, earlier),
        max_tokens=request.max_output_tokens,
        limit_name="max_output_tokens",
        format_schema=_format_schema(request),
        logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
    )
    run = _Run(call, request, answer, earlier)
    if request.stream:
        return EventStream(events=run.events())
    return Reply(body=await run.response())


async def get_response(call: Call) -> Reply:
    """A response that was kept."""
    kept = await call.server.jobs.responses.get(call.caller.tenant, call.path_params["response_id"])
    return Reply(body=kept.response)


async def input_items(call: Call) -> Reply:
    """What a kept response was made from, its latest item first."""
    kept = await call.server.jobs.responses.get(call.caller.tenant, call.path_params["response_id"])
    order, after = call.query.get("order", "desc"), call.query.get("after") or None
    limit = page_limit(call, 100)
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", "order")
    given = kept.items[: len(kept.items) - len(kept.response["output"])]
    items = [_listed(item, index) for index, item in enumerate(given)]
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad_request("after must be the id of an item of this list.", "after")
        items = items[ids.index(after) + 1 :]
    return Reply(body=page_of(items[:limit], len(items) > limit))


async def count_input_tokens(call: Call, request: ResponsesRequest) -> Reply:
    """The length of the prompt that a response would have."""
    call.server.check_model(request.model, call.caller)
    _check(request, keeps=call.server.config.keep_responses_s is not None)
    conversation = await call.read(_conversation, request, await _earlier(call, request))
    prompt = await prompt_of(call, conversation)
    (ids,) = await tokenize(call.server, prompt, add_special_tokens=False, param=call.prompt_field)
    return Reply(body={"object": "response.input_tokens", "input_tokens": len(ids)})


async def delete_response(call: Call) -> Reply:
    """Forget a response."""
    response_id = call.path_params["response_id"]
    await call.server.jobs.responses.delete(call.caller.tenant, response_id)
    return Reply(body={"id": response_id, "object": "response", "deleted": True})


def _check(request: ResponsesRequest, *, keeps: bool) -> None:
    """Refuse what needs state that is not kept, and what is not there."""
    if request.previous_response_id is not None and not keeps:
        name = "previous_response_id"
        raise bad_request(
            f"{name}: this server keeps no responses (see --keep-responses-s); send the whole "
            "conversation as input.",
            name,
        )
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise bad_request(f"{name}: send the whole conversation as input.", name)
    if request.background:
        raise bad_request("background: use the batch API for work that can wait.", "background")
    if request.truncation == "auto":
        raise bad_request("truncation: only disabled is supported.", "truncation")
    if unknown := [name for name in request.include or () if name not in _INCLUDABLE]:
        raise bad_request(f"include: {unknown[0][:80]!r} is not available.", "include")


async def _earlier(call: Call, request: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of the conversation that the request goes on with."""
    if request.previous_response_id is None:
        return []
    kept = await call.server.jobs.responses.get(
        call.caller.tenant, request.previous_response_id, param="previous_response_id"
    )
    return kept.items


def _format_schema(request: ResponsesRequest) -> FormatSchema | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.schema is None:
        raise bad_request("text.format of type json_schema needs a schema.", "text.format")
    return FormatSchema(field="text.format", schema=wanted.schema or {"type": "object"})


def _conversation(request: ResponsesRequest, earlier: list[dict[str, Any]]) -> ChatInput:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    for item in msgspec.convert(earlier, list[InputItem]):
        _add_item(messages, item, "previous_response_id")
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for index, item in enumerate(request.input):
            _add_item(messages, item, f"input[{index}]")
    choice, allowed = _tool_choice(request)
    effort = request.reasoning.effort if request.reasoning else None
    variables: dict[str, Any] = {}
    if effort is not None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return ChatInput(
        messages=messages,
        tools=tuple(
            ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)
            for tool in request.tools or ()
        ),
        choice=choice,
        allowed=allowed,
        parallel_calls=request.parallel_tool_calls is not False,
        variables=variables,
    )


def _tool_choice(request: ResponsesRequest) -> tuple[Choice, tuple[str, ...] | None]:
    """What must be called, and which tools may be; ``None`` is all."""
    match request.tool_choice:
        case ResponsesToolChoice(name=name):
            return "required", (name,)
        case ResponsesAllowedTools(mode=mode, tools=tools):
            return mode, tuple(tool.name for tool in tools)
        case choice:
            return choice or "auto", None


def _add_item(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    kind = item.type or "message"
    if kind == "message" and item.role is not None:
        messages.append({"role": item.role, "content": _text(item.content, where)})
    elif kind == "function_call" and item.name is not None:
        call = call_input(item.call_id, item.name, item.arguments or "{}")
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output" and item.call_id is not None:
        text = _text(item.output, where)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    elif kind == "reasoning":
        return  # earlier reasoning is not sent to the model again
    else:
        raise bad_request(f"{where}: an item of type {kind!r} is not understood here.", where)


def _text(content: str | list[Any] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_file":
            file = {name: value for name, value in part.items() if name != "type"}
            parts.append(text_of_file(file, where))
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            raise bad_request(f"{where}: this model reads text and files of text only.", where)
    return "\n".join(parts)


def _listed(item: dict[str, Any], index: int) -> dict[str, Any]:
    """An item with an id, as lists have it; text that was given plainly is a part."""
    listed = {"id": f"item_{index}", "type": "message", "status": "completed", **item}
    if listed["type"] == "message" and isinstance(listed.get("content"), str):
        kind = "output_text" if listed["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": listed["content"]}]
    return listed


class _Run:
    """One response on its way, as items that come one after the other."""

    def __init__(
        self,
        call: Call,
        request: ResponsesRequest,
        answer: AnswerJob,
        earlier: list[dict[str, Any]],
    ) -> None:
        self._call, self._request, self._job = call, request, answer
        self._earlier = earlier
        self._ttl_s = call.server.config.keep_responses_s
        self._is_kept = self._ttl_s is not None and request.store is not False and not call.is_batch
        self._answer: Answer = answer.new_answer()
        self._id, self._created = new_id("resp_"), int(time.time())
        self._items: list[OutputItem] = []
        self._pending: list[ChosenLogprob] = []  # of tokens whose text is held back
        self._sequence = 0
        self._wants_logprobs = answer.job.params.logprobs is not None

    async def response(self) -> dict[str, Any]:
        async for _, chunk, delta in answer_pieces(self._job, [self._answer]):
            self._take(chunk, delta)
        self._end()
        return await self._kept(self._response(self._status()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async for _, chunk, delta in answer_pieces(self._job, [self._answer]):
            if not begun:
                begun = True
                start = self._response("in_progress")
                yield self._event("response.created", response=start)
                yield self._event("response.in_progress", response=start)
            for name, fields in self._take(chunk, delta):
                yield self._event(name, **fields)
        if (retraction := self._answer.retraction) is not None:
            self._retract()
            yield self._event("ridgeline.retraction", retraction=retraction)
        for name, fields in self._end():
            yield self._event(name, **fields)
        status = self._status()
        response = await self._kept(self._response(status))
        yield self._event(f"response.{status}", response=response)

    async def _kept(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response, once it is on disk where it is to be kept."""
        if self._is_kept and self._ttl_s is not None:
            given = self._request.input
            asked = [{"role": "user", "content": given}] if isinstance(given, str) else given
            plain = msgspec.to_builtins([*asked, *response["output"]])
            items = [{k: v for k, v in item.items() if v is not None} for item in plain]
            kept = KeptResponse(response=response, items=[*self._earlier, *items])
            responses = self._call.server.jobs.responses
            await responses.put(self._call.caller.tenant, kept, ttl_s=self._ttl_s)
        return response

    def _take(self, chunk: CompletionChunk, delta: AnswerDelta) -> Events:
        """Put what a chunk adds into the items; returns the events that tell of it."""
        out: Events = []
        if self._wants_logprobs:
            self._pending += chat_logprobs(self._call.server.engine.tokenizer, chunk.logprobs)
        for part in delta.parts:
            if isinstance(part, Reasoning):
                out += self._piece("reasoning", "reasoning_text", part.text)
            elif isinstance(part, Content):
                out += self._piece("message", "output_text", part.text, self._pending)
                self._pending = []
            else:
                out += self._call_piece(part)
        if delta.parts:
            self._pending = []
        return out

    def _call_piece(self, call: CallDelta) -> Events:
        out: Events = []
        if call.id is not None:
            call_id = f"call_{call.id}"
            out += self._open("function_call", call_id=call_id, name=call.name or "")
        if call.arguments:
            item = self._items[-1]
            item.text += call.arguments
            fields = {"item_id": item.id, "output_index": item.index, "delta": call.arguments}
            out.append(("response.function_call_arguments.delta", fields))
        return out

    def _piece(
        self, kind: str, name: str, text: str, entries: list[ChosenLogprob] | None = None
    ) -> Events:
        out = [] if self._items and self._items[-1].kind == kind else self._open(kind)
        item = self._items[-1]
        item.text += text
        item.logprobs += entries or []
        fields = {**item.place, "delta": text}
        if kind == "message":
            fields["logprobs"] = entries or []
        return [*out, (f"response.{name}.delta", fields)]

    def _open(self, kind: str, *, call_id: str = "", name: str = "") -> Events:
        out = self._close()
        item = OutputItem(kind, len(self._items), call_id=call_id, name=name)
        self._items.append(item)
        added = {"output_index": item.index, "item": item.json()}
        out.append(("response.output_item.added", added))
        if kind == "message":
            fields = {**item.place, "part": item.part()}
            out.append(("response.content_part.added", fields))
        return out

    def _retract(self) -> None:
        """Keep the items of what is left of the answer."""
        items: list[OutputItem] = []
        for index, part in enumerate(self._answer.whole.parts):
            if isinstance(part, CallDelta):
                call_id = f"call_{part.id}"
                item = OutputItem("function_call", index, call_id=call_id, name=part.name or "")
                item.text = part.arguments
            else:
                is_reasoning = isinstance(part, Reasoning)
                item = OutputItem("reasoning" if is_reasoning else "message", index)
                item.text = part.text
            if index < len(self._items) and self._items[index].kind == item.kind:
                item.id, item.status = self._items[index].id, self._items[index].status
            items.append(item)
        self._items, self._pending = items, []

    def _end(self) -> Events:
        """Close the last item, of which there is at least one; what cut the output cut it."""
        out = [] if self._items else self._open("message")
        self._items[-1].logprobs += self._pending
        return out + self._close(self._status())

    def _close(self, status: str = "completed") -> Events:
        """The events that end the last item."""
        if not self._items:
            return []
        item = self._items[-1]
        item.status = status
        out: Events = []
        if item.kind == "function_call":
            fields = {"item_id": item.id, "output_index": item.index, "arguments": item.text}
            out.append(("response.function_call_arguments.done", fields | {"name": item.name}))
        elif item.kind == "reasoning":
            out.append(("response.reasoning_text.done", {**item.place, "text": item.text}))
        else:
            done = {**item.place, "text": item.text, "logprobs": item.logprobs}
            out.append(("response.output_text.done", done))
            fields = {**item.place, "part": item.part()}
            out.append(("response.content_part.done", fields))
        done = {"output_index": item.index, "item": item.json()}
        out.append(("response.output_item.done", done))
        return out

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, kind)

    def _status(self) -> str:
        is_cut = self._answer.finish_reason in ("length", "abort", "content_filter")
        return "incomplete" if is_cut else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        request, params = self._request, self._job.job.params
        reason = _REASONS.get(self._answer.finish_reason or "")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._job.model,
            "output": [item.json() for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort},
            "store": self._is_kept,
            "temperature": params.temperature,
            "text": {"format": _format(request)},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_tool(tool) for tool in request.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if status != "in_progress" else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._call)
        result: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._call.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        if self._call.replayed_tokens:
            result["output_tokens_details"]["cached_tokens"] = self._call.replayed_tokens
        return result if usage.cost is None else result | {"cost": usage.cost}


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _format(request: ResponsesRequest) -> Any:
    wanted = request.text.format if request.text else None
    return {"type": "text"} if wanted is None else wanted
