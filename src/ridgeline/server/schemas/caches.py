"""``/v1/caches``."""

from typing import Annotated

from msgspec import Meta, Struct

from ridgeline.server.schemas.generation import Name, Usage
from ridgeline.server.schemas.plain import ExplainRequest

MAX_TTL_S = 30 * 86400
Ttl = Annotated[float, Meta(gt=0, le=MAX_TTL_S)]


class CacheRequest(ExplainRequest, kw_only=True):
    """A prompt, or messages with tools. ``ttl``: seconds until it expires.

    ``tenant``: the key whose requests may name it, by its name, for the admin; who may also let it
    never expire (``null``).
    """

    add_generation_prompt: bool = False
    ttl: Ttl | None = 3600.0
    tenant: Name | None = None


class CacheChange(Struct, forbid_unknown_fields=True, kw_only=True):
    """``ttl``: seconds from now."""

    ttl: Ttl | None


class CacheStorage(Struct, kw_only=True, omit_defaults=True):
    """Tokens that were kept, each for so many hours until now, and what that cost."""

    token_hours: float
    cost: float | None = None


class CacheCard(Struct, kw_only=True):
    """A named prefix of ``tokens``, of which ``pinned_tokens`` are kept: whole KV blocks.

    ``usage`` is what making it took.
    """

    id: str
    object: str = "cached_content"
    model: str
    tenant: str
    created_at: int
    expires_at: int | None
    tokens: int
    pinned_tokens: int
    cache_salt: str | None
    storage: CacheStorage
    usage: Usage | None = None


class CacheList(Struct, kw_only=True):
    """The caller's, or all."""

    object: str = "list"
    data: list[CacheCard]
