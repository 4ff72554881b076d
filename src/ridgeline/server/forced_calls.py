"""A call that must be made, as a grammar in the format that the model was trained on."""

from dataclasses import dataclass

from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.server.conversation import Conversation
from ridgeline.text.output import call_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCall:
    """What the output must be, and the parser that reads the call in it."""

    grammar: StructuredOutputs
    parser: str


def forced_call(conversation: Conversation, parser: str, template: str) -> ForcedCall | None:
    """The one call that ``tool_choice`` demands, ``None`` where the model may choose.

    ``parser`` is the model's, and ``template`` its chat template. A format that is not JSON is not
    forced: the call is then a plain JSON object.

    Raises:
        InvalidRequestError: a schema is none.
    """
    schema = conversation.call_schema()
    if schema is None:
        return None
    tools = [(tool.name, tool.parameters or {"type": "object"}) for tool in conversation.callable]
    parts = call_parts(parser, template, tools)
    grammar = StructuredOutputs.of({"json": schema} if parts is None else {"parts": parts})
    assert grammar is not None
    return ForcedCall(grammar=grammar, parser="json" if parts is None else parser)
