"""Embeddings (OpenAI's), scores (vLLM's), reranked documents (Jina's and Cohere's)."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ridgeline.server.schemas.generation import Cost, Name

MAX_INPUTS = 2048

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
Truncation = Annotated[int, Meta(ge=-1, le=1 << 30)]


class EmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``input``: a string, token ids, or a list of either. ``user`` is inert.

    ``prompt_name``: which of the checkpoint's prompts goes before texts, "" for none.
    ``truncate_prompt_tokens``: texts are cut to so many tokens, −1 to what the context holds.
    """

    input: Annotated[str | list[Any], Meta(description="string, token ids, or a list of either")]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


class EmbeddingItem(Struct, kw_only=True):
    """``embedding``: numbers, or little-endian float32 in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class PoolingUsage(Struct, kw_only=True, omit_defaults=True):
    """Tokens of all inputs, and their cost where the server has a price."""

    prompt_tokens: int
    total_tokens: int
    cost: Cost | None = None


class EmbeddingResponse(Struct, kw_only=True):
    """Vectors in the order of the inputs."""

    object: str = "list"
    data: list[EmbeddingItem]
    model: str
    usage: PoolingUsage


class ScoreRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Each of ``text_2`` is scored with the text of ``text_1`` beside it, or with the only one.

    ``truncate_prompt_tokens``: pairs are cut to so many tokens, −1 to what the context holds.
    """

    text_1: str | Texts
    text_2: str | Texts
    model: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


class ScoreItem(Struct, kw_only=True):
    """One pair's relevance."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(Struct, kw_only=True):
    """Scores in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage


class TextDocument(Struct, forbid_unknown_fields=True, kw_only=True):
    """A document as Cohere and Jina write it, too."""

    text: str


class RerankRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``top_n``: how many of the documents are wanted, 0 for all of them.

    ``truncate_prompt_tokens`` as for scores. ``return_documents``: results have their texts.
    """

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: Name | None = None
    top_n: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    return_documents: bool = True
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = None


class RankedDocument(Struct, kw_only=True, omit_defaults=True):
    """``index`` is the document's place in the request."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankResponse(Struct, kw_only=True):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
