"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ridgeline.server.answers import (
    AnswerDelta,
    AnswerJob,
    CallDelta,
    Part,
    answer_pieces,
    arguments_object,
    prepare_answer,
    prompt_of,
)
from ridgeline.server.context import Call
from ridgeline.server.conversation import ChatInput, Choice, ToolSpec, call_input
from ridgeline.server.cost import cost_of
from ridgeline.server.errors import THREAD_UNSUPPORTED, ApiError, bad_request
from ridgeline.server.ids import new_id
from ridgeline.server.output_formats import FormatSchema
from ridgeline.server.prompts import tokenize
from ridgeline.server.replies import EventStream, Reply, event
from ridgeline.server.schemas.messages import (
    AnswerBlock,
    Block,
    ContextEdit,
    CountTokensRequest,
    CountTokensResponse,
    InputMessage,
    MessagesRequest,
    MessagesResponse,
    MessagesToolChoice,
    MessagesUsage,
    TextSource,
)
from ridgeline.server.text_files import text_of_base64
from ridgeline.text.output import Content, Reasoning

_PING = event({"type": "ping"}, "ping")
_CHOICES: dict[str, Choice] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}
_NEEDED = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
_FIELDS = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "document": ("source", "title", "context", "citations"),
    "tool_reference": ("tool_name",),
}
_OTHERS = {
    kind: tuple(
        name for name in Block.__struct_fields__ if name not in {*names, "type", "cache_control"}
    )
    for kind, names in _FIELDS.items()
}
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


async def messages(call: Call, request: MessagesRequest) -> Reply | EventStream:
    """Answer a conversation."""
    if request.stop is not None and request.stop_sequences is not None:
        raise bad_request("stop and stop_sequences exclude each other.", "stop_sequences")
    if request.thread is not None:
        text = "thread: this server holds no conversations; send all messages."
        raise bad_request(text, "thread", THREAD_UNSUPPORTED)
    stop = None if request.stop_sequences is None else tuple(request.stop_sequences)
    config = request.output_config
    format_schema = None
    if config is not None and config.format is not None:
        format_schema = FormatSchema(field="output_config.format", schema=config.format.schema)
    answer = await prepare_answer(
        call,
        request,
        await call.read(_conversation, request),
        max_tokens=request.max_tokens,
        limit_name=None,
        format_schema=format_schema,
        stop=stop,
    )
    run = _Run(call, answer, stop or ())
    if request.stream:
        return EventStream(events=run.events(), ping=_PING)
    return Reply(body=await run.response())


async def count_tokens(call: Call, request: CountTokensRequest) -> Reply:
    """The length of the prompt that a message would have."""
    call.server.check_model(request.model, call.caller)
    prompt = await prompt_of(call, await call.read(_conversation, request))
    (ids,) = await tokenize(call.server, prompt, add_special_tokens=False, param=call.prompt_field)
    return Reply(body=CountTokensResponse(input_tokens=len(ids)))


def _conversation(request: MessagesRequest | CountTokensRequest) -> ChatInput:
    turns: list[dict[str, Any]] = []
    if request.system:
        turns.append({"role": "system", "content": _text(request.system, "system")})
    choice = request.tool_choice
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise bad_request("tool_choice of type tool needs a name.", "tool_choice.name")
    forced = choice.name if choice is not None and choice.type == "tool" else None
    tools = [
        ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            is_deferred=bool(tool.defer_loading) and tool.name != forced,
        )
        for tool in request.tools or ()
    ]
    references = _References(tools)
    for index, message in enumerate(request.messages):
        turns += _turns(message, f"messages[{index}]", references)
    for edit in request.context_management.edits if request.context_management else ():
        _clear_thinking(turns, edit)
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    variables: dict[str, Any] = {"enable_thinking": thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return ChatInput(
        messages=turns,
        tools=tuple(tools),
        choice="auto" if choice is None else _CHOICES[choice.type],
        allowed=_allowed(choice, references),
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        variables=variables,
        # A last turn of the assistant's is the beginning of the answer.
        add_generation_prompt=turns[-1]["role"] != "assistant",
        continue_final_message=turns[-1]["role"] == "assistant",
    )


def _clear_thinking(turns: Sequence[dict[str, Any]], edit: ContextEdit) -> None:
    """Leave out the reasoning of all turns but the last that ``edit`` keeps."""
    if edit.keep != "all":
        thought = [turn for turn in turns if "reasoning_content" in turn]
        for turn in thought[: -edit.keep.value]:
            del turn["reasoning_content"]


def _allowed(
    choice: MessagesToolChoice | None, references: "_References"
) -> tuple[str, ...] | None:
    """What a call that must be made may be of."""
    if choice is None or choice.type in ("auto", "none"):
        return None
    return references.known if choice.type == "any" or choice.name is None else (choice.name,)


class _References:
    """Tools that results may refer to. The model is told of each once, however often they do."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._told: set[str] = set()

    def definition(self, name: str, where: str) -> str:
        """What a prompt would begin with, were the tool not deferred; then its name alone."""
        tool = self._tools.get(name)
        if tool is None:
            raise bad_request(f"{where}: there is no {name[:80]!r} in tools.", where)
        if name in self._told:
            return name
        self._told.add(name)
        return json.dumps(tool.as_template_input(), ensure_ascii=False)

    @property
    def known(self) -> tuple[str, ...]:
        """The tools that the model knows of."""
        tools = self._tools.items()
        return tuple(name for name, each in tools if not each.is_deferred or name in self._told)


def _turns(message: InputMessage, where: str, references: _References) -> list[dict[str, Any]]:
    """Template inputs of one turn; each tool result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "system":
        return [{"role": message.role, "content": _text(message.content, where)}]
    turns: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        _check_fields(block, where)
        if block.type == "text" and block.text is not None:
            texts.append({"type": "text", "text": block.text})
        elif block.type == "document":
            texts.append({"type": "text", "text": _document(block, where)})
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use" and block.name is not None:
            calls.append(call_input(block.id, block.name, block.input or {}))
        elif block.type == "tool_result" and block.tool_use_id is not None:
            turns.append(
                {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _text(block.content or "", where, references),
                }
            )
        elif block.type != "redacted_thinking":
            raise _not_read(block, where)
    if texts or calls or thoughts or not turns:
        turn: dict[str, Any] = {"role": message.role, "content": texts}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        turns.append(turn)
    return turns


def _text(
    content: str | list[Block] | list[Any], where: str, references: _References | None = None
) -> str:
    """A system message, or a tool's result, which may refer to tools."""
    if isinstance(content, str):
        return content
    readable = {"text": "text"}
    if references is not None:
        readable["tool_reference"] = "tool_name"
    parts = []
    for item in content:
        block = item if isinstance(item, Block) else _result_block(item, where)
        value = getattr(block, readable.get(block.type, ""), None)
        if value is None:
            raise _not_read(block, where, readable)
        _check_fields(block, where)
        if references is not None and block.type == "tool_reference":
            value = references.definition(value, where)
        parts.append(value)
    return "\n".join(parts)


def _check_fields(block: Block, where: str) -> None:
    """ApiError 400 for a field that blocks of this type do not have."""
    others = _OTHERS.get(block.type, ())
    for name in others:
        if getattr(block, name) is not None:
            raise bad_request(f"{where}: a {block.type} block has no {name}.", where)


def _document(block: Block, where: str) -> str:
    """A document with what is said of it, each on lines of its own."""
    try:
        source = msgspec.convert(block.source, TextSource)
    except msgspec.ValidationError:
        raise bad_request(f"{where}: this model reads documents of plain text.", where) from None
    is_plain = source.type == "text"
    text = source.data if is_plain else text_of_base64(source.data, where)
    return "\n".join(part for part in (block.title, block.context, text) if part)


def _not_read(block: Block, where: str, readable: Mapping[str, str] = _NEEDED) -> ApiError:
    """``readable``: the types of blocks that could stand there, each with the field it needs."""
    needed = readable.get(block.type)
    if needed is not None and getattr(block, needed) is None:
        return bad_request(f"{where}: a {block.type} block needs {needed}.", where)
    return bad_request(f"{where}: this model does not read {block.type!r} blocks here.", where)


def _result_block(item: Any, where: str) -> Block:
    try:
        return msgspec.convert(item, Block)
    except msgspec.ValidationError:
        raise bad_request(f"{where}: a tool result must be text or text blocks.", where) from None


class _Run:
    """One message on its way; an answer is a list of blocks, one after the other."""

    def __init__(self, call: Call, answer: AnswerJob, stops: tuple[str, ...]) -> None:
        self._call, self._job = call, answer
        self._answer = answer.new_answer()
        self._id = new_id("msg_")
        self._stops = stops
        self._block = -1  # the index of the open block, and its kind
        self._kind = ""

    async def response(self) -> MessagesResponse:
        async for _ in answer_pieces(self._job, [self._answer]):
            pass
        message = self._message()
        parts = self._answer.whole.parts
        message.content = [_block(part) for part in parts or [Content("")]]
        message.stop_reason, message.stop_sequence = self._end()
        return message

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async for _, _, added in answer_pieces(self._job, [self._answer]):
            if not begun:
                begun = True
                start = {"type": "message_start", "message": self._message()}
                yield event(start, "message_start")
            for data in self._deltas(added):
                yield event(data, data["type"])
        if (retraction := self._answer.retraction) is not None:
            data = {"type": "ridgeline_retraction", "retraction": retraction}
            yield event(data, data["type"])
        if self._block < 0:
            for data in self._open("text", AnswerBlock(type="text", text="")):
                yield event(data, data["type"])
        stop = {"type": "content_block_stop", "index": self._block}
        yield event(stop, "content_block_stop")
        reason, sequence = self._end()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield event(end, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def _deltas(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for part in delta.parts:
            if isinstance(part, Reasoning):
                block = AnswerBlock(type="thinking", thinking="", signature="")
                out += self._open("thinking", block)
                out.append(self._delta({"type": "thinking_delta", "thinking": part.text}))
            elif isinstance(part, Content):
                out += self._open("text", AnswerBlock(type="text", text=""))
                out.append(self._delta({"type": "text_delta", "text": part.text}))
            else:
                out += self._call_deltas(part)
        return out

    def _call_deltas(self, call: CallDelta) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        if call.id is not None:
            block = AnswerBlock(type="tool_use", id=_tool_id(call.id), name=call.name, input={})
            out += self._open(f"tool {call.index}", block)
        if call.arguments:
            piece = {"type": "input_json_delta", "partial_json": call.arguments}
            out.append(self._delta(piece))
        return out

    def _open(self, kind: str, block: AnswerBlock) -> list[dict[str, Any]]:
        """Begin a block of this kind, unless one is open; it ends the one before."""
        if kind == self._kind:
            return []
        out: list[dict[str, Any]] = []
        if self._block >= 0:
            out.append({"type": "content_block_stop", "index": self._block})
        self._block += 1
        self._kind = kind
        content = {name: value for name, value in _as_dict(block).items() if value is not None}
        out.append({"type": "content_block_start", "index": self._block, "content_block": content})
        return out

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self) -> MessagesResponse:
        return MessagesResponse(id=self._id, model=self._job.model, content=[], usage=self._usage())

    def _usage(self) -> MessagesUsage:
        call = self._call
        return MessagesUsage(
            input_tokens=call.prompt_tokens - call.cached_tokens,
            output_tokens=call.output_tokens,
            cache_read_input_tokens=call.cached_tokens,
            cost=cost_of(call) or UNSET,
        )

    def _end(self) -> tuple[str, str | None]:
        """Stop reason and the stop sequence that it was."""
        is_filtered = self._answer.finish_reason == "content_filter"
        if self._answer.stop_reason in self._stops and not is_filtered:
            return "stop_sequence", str(self._answer.stop_reason)
        limit = self._job.job.params.max_tokens
        if self._answer.finish_reason == "length" and self._answer.num_tokens < (limit or 0):
            return "model_context_window_exceeded", None
        return _STOP_REASONS.get(self._answer.finish_reason or "", "end_turn"), None


def _block(part: Part) -> AnswerBlock:
    if isinstance(part, Reasoning):
        return AnswerBlock(type="thinking", thinking=part.text, signature="")
    if isinstance(part, Content):
        return AnswerBlock(type="text", text=part.text)
    return AnswerBlock(
        type="tool_use",
        id=_tool_id(part.id or ""),
        name=part.name,
        input=arguments_object(part.arguments),
    )


def _tool_id(call_id: str) -> str:
    return f"toolu_{call_id}"


def _as_dict(block: AnswerBlock) -> dict[str, Any]:
    return msgspec.structs.asdict(block)
