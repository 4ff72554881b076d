"""Calls as a grammar in the format that the model was trained on, where they are not left free."""

import json
from dataclasses import dataclass

from ridgeline.core.structured_outputs import GrammarKind, StructuredOutputs
from ridgeline.server.conversation import ChatInput
from ridgeline.server.errors import bad_request
from ridgeline.text.output import call_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCall:
    """What the output must be, and the parser that reads the call in it."""

    grammar: StructuredOutputs
    parser: str


def forced_call(
    conversation: ChatInput,
    wanted: StructuredOutputs | None,
    parser: str | None,
    template: str,
) -> ForcedCall | None:
    """The grammar of a call that ``tool_choice`` demands, or that may take the place of ``wanted``.

    ``None`` where there are no tools, or the model is free to call and to write as it likes.
    ``wanted`` is what the text of the answer must be, ``parser`` the model's, if any, and
    ``template`` its chat template. A format that is not JSON is not forced: a call that must be
    made is then a plain JSON object.

    Raises:
        ApiError: the tools and ``wanted`` exclude each other.
        InvalidRequestError: a schema is none.
    """
    schema = conversation.call_schema()
    if not conversation.offered_tools or (schema is None and wanted is None):
        return None
    tools = [(tool.name, tool.arguments_schema) for tool in conversation.callable]
    parts = call_parts(parser, template, tools)
    if wanted is not None:
        if schema is not None:
            raise bad_request(
                "tool_choice and structured outputs exclude each other.", "tool_choice"
            )
        if parts is None or wanted.kind is not GrammarKind.JSON:
            raise bad_request(
                "This model cannot choose between tools and this structured output; "
                "leave one of them out, or set tool_choice to none.",
                "tools",
            )
        parts.append([{"json": json.loads(wanted.source)}])
    grammar = StructuredOutputs.of({"json": schema} if parts is None else {"parts": parts})
    assert grammar is not None
    return ForcedCall(grammar=grammar, parser=parser if parts and parser else "json")
