"""Fields that clients of other servers send, and what is here instead."""

from collections.abc import Iterable

from ridgeline.core.config import EngineConfig
from ridgeline.core.spelling import suggestion
from ridgeline.server.config import ServerConfig

_FORMAT = "structured_outputs holds it, as json, regex or grammar"
_EFFORT = "reasoning_effort asks for it, or with none for no reasoning"
_BUDGET = "reasoning has no limit of its own, and counts towards max_tokens"
_TEXT = "the models here read and write text"
_SETTINGS = {*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__}
# The end of the sentence "NAME: this field is not known", of a chat.
_INSTEAD = {
    "allowed_token_ids": "structured_outputs limits texts, by choice, regex or grammar",
    "audio": _TEXT,
    "bad_words": "a logit_bias of -100 bars a token",
    "chat_template": "the server has one, by --chat-template",
    "ebnf": _FORMAT,
    "echo": "/v1/completions has it",
    "enable_thinking": "chat_template_kwargs has it",
    "function_call": "tool_choice names the function",
    "functions": "tools has them",
    "grammar": _FORMAT,
    "json_schema": _FORMAT,
    "lora_path": "adapters are asked for as model",
    "max_thinking_tokens": _BUDGET,
    "media_io_kwargs": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "num_ctx": "the context is the server's, by --max-model-len",
    "reasoning": _EFFORT,
    "reasoning_format": "include_reasoning says whether reasoning is told, always apart",
    "regex": _FORMAT,
    "return_tokens_as_token_ids": "return_token_ids gives them beside the text",
    "think": _EFFORT,
    "thinking": _EFFORT,
    "thinking_token_budget": _BUDGET,
    "web_search_options": "this server calls no other",
}


def instead_of_field(name: str, known: Iterable[str], *, is_of_chat: bool) -> str:
    """The end of a sentence that says a field is not known: what does its work, or the ``known``
    one that is spelled most alike."""
    text = _INSTEAD.get(name) if is_of_chat else None
    if text is None and name in _SETTINGS:
        text = f"it is a setting of the server, by --{name.replace('_', '-')}"
    return suggestion(name, known) if text is None else f"; {text}."
