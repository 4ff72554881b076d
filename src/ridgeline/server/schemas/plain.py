"""Models and the tokenize family."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ridgeline.server.schemas.chat import ChatMessage, Tool
from ridgeline.server.schemas.generation import Name

MODELS_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}


class ModelCard(Struct, kw_only=True):
    """A model that a request can name.

    Where there are several: whether it is ``loaded``, ``loading``, ``unloaded`` or ``unloading``,
    the memory that it takes or would take, and the seconds of loading it, measured once it was.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "ridgeline"
    max_model_len: int
    root: str
    parent: str | None = None
    state: str | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET
    load_s: float | UnsetType = UNSET
    failure: str | UnsetType = UNSET


class ModelRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of several models."""

    model: Name


class ModelList(Struct, kw_only=True):
    """Every such model."""

    object: str = "list"
    data: list[ModelCard]


class TextFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Either ``prompt`` or ``messages``, as generation would read them."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    model: Name | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeRequest(TextFields, kw_only=True):
    """``return_token_strs``: the text of each token as well.

    ``content`` is llama.cpp's word for ``prompt``; then special tokens are added only with
    ``add_special``, and ``with_pieces`` makes of each token an id and its text. ``parse_special``
    is inert where it is true, and else refused.
    """

    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: Literal[True] = True
    with_pieces: bool = False


class ExplainRequest(TextFields, kw_only=True):
    """``cache_salt``: that of the requests which were to reuse the prompt."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class MissResponse(Struct, kw_only=True):
    """How far a prompt is cached, and where it leaves the nearest cached prompt of the same key.

    There it has ``token`` where the other has ``cached_token``; without them one of the two ends.
    ``evicted_tokens`` of the matching ones have lost their KV.
    """

    prompt_tokens: int
    cached_tokens: int
    matching_tokens: int
    evicted_tokens: int
    token_id: int | None
    token: str | None
    cached_token_id: int | None
    cached_token: str | None


class TokenizeResponse(Struct, kw_only=True):
    """``count`` is the number of ``tokens``: ids, or with ``with_pieces`` ids and texts."""

    count: int
    max_model_len: int
    tokens: list[Any]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids to turn into text; special tokens are kept."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=1 << 20)]
    model: Name | None = None


class DetokenizeResponse(Struct, kw_only=True):
    """The text, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(Struct, kw_only=True):
    """What clients need to know to tokenize as the server does."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    max_model_len: int
    chat_template: str | None
