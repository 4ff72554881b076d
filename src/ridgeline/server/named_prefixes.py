"""Named prefixes: what a client has sent once, and goes on from by its id."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.core.errors import OutOfMemoryError, OverloadedError
from ridgeline.engine.client import EngineClient, PinnedPrefix
from ridgeline.planning.cost import token_storage_cost
from ridgeline.server.config import ServerConfig
from ridgeline.server.conversation import ChatInput, ToolSpec
from ridgeline.server.errors import ApiError, bad_request
from ridgeline.server.ids import new_id

MAX_BYTES = 16 << 20  # of what one key's prefixes were made from
_FIELD = "cached_content"
_HOUR_S = 3600.0


@dataclass(slots=True, kw_only=True, eq=False)
class NamedPrefix:
    """A prefix of a tenant's prompts: a text, or messages with the tools beside them.

    ``token_ids`` are those of the prefix alone. ``cache_salt`` is the client's and ``salt`` the
    engine's, which separates tenants as well. ``num_bytes``: of the request that made it.
    ``expires_s`` and ``settled_s``, up to which its storage has been charged, are on the
    ``time.monotonic`` clock; ``None`` does not expire.
    """

    id: str
    tenant: str
    model: str
    adapter: str | None
    cache_salt: str
    salt: str
    prompt: str | None
    messages: Sequence[dict[str, Any]]
    tools: tuple[ToolSpec, ...]
    variables: dict[str, Any]
    token_ids: tuple[int, ...]
    num_bytes: int
    created: int
    expires_s: float | None = None
    pin: PinnedPrefix | None = None
    token_hours: float = 0.0
    settled_s: float = field(default_factory=time.monotonic)
    pinning: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def expires_at(self) -> int | None:
        """In seconds since 1970."""
        if self.expires_s is None:
            return None
        return int(time.time() + self.expires_s - time.monotonic())

    @property
    def num_pinned(self) -> int:
        """Tokens whose KV is kept: whole blocks."""
        return 0 if self.pin is None else self.pin.num_tokens

    def before(self, conversation: ChatInput) -> ChatInput:
        """The conversation with the prefix before it.

        Raises:
            ApiError: 400, it is a text.
        """
        if self.prompt is not None:
            raise bad_request("This cached content is a prompt; name it in a completion.", _FIELD)
        return replace(
            conversation,
            messages=[*self.messages, *conversation.messages],
            tools=conversation.tools or self.tools,
            variables=self.variables | conversation.variables,
        )

    def before_prompt(self, prompt: str | list[Any]) -> str | list[Any]:
        """A prompt field with the prefix before each prompt in it; ApiError 400 for messages."""
        if self.prompt is None:
            raise bad_request("This cached content has messages; name it in a chat.", _FIELD)
        if isinstance(prompt, str):
            return self.prompt + prompt
        if prompt and all(type(token) is int for token in prompt):
            return [*self.token_ids, *prompt]
        return [
            self.before_prompt(each) if isinstance(each, str | list) else each for each in prompt
        ]

    def check(self, token_ids: Sequence[int], text: Callable[[int], str]) -> None:
        """Refuse a prompt that does not begin as the prefix does.

        The prefix's last token does not count: it may be one with what follows. ``text`` is that of
        a token.

        Raises:
            ApiError: 409 with the first token that differs.
        """
        for index, (own, other) in enumerate(zip(self.token_ids[:-1], token_ids, strict=False)):
            if own != other:
                raise ApiError(
                    409,
                    f"The prompt leaves the cached content at token {index}: it has {other} "
                    f"({text(other)[:40]!r}) where that has {own} ({text(own)[:40]!r}).",
                    param=_FIELD,
                    code="cached_content_mismatch",
                )
        if len(token_ids) < len(self.token_ids) - 1:
            raise ApiError(
                409,
                f"The prompt ends at token {len(token_ids)}, within the cached content.",
                param=_FIELD,
                code="cached_content_mismatch",
            )


class NamedPrefixes:
    """The prefixes of all tenants, in memory, pinned in the engine; for one event loop.

    ``charge`` is told a tenant and what the storage of its prefixes has cost since the last time.
    """

    def __init__(
        self, engine: EngineClient, config: ServerConfig, charge: Callable[[str, float], None]
    ) -> None:
        self._engine = engine
        self._config = config
        self._charge = charge
        self._prefixes: dict[str, NamedPrefix] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def add(
        self, prefix: NamedPrefix, *, ttl_s: float | None, priority: int, is_limited: bool
    ) -> None:
        """Compute a prefix and keep it; ``is_limited``: by what one tenant may have.

        Raises:
            ApiError: 429 at a limit of the tenant's, 400 where it is too short or leaves the pool
                no room, 409 where it was deleted meanwhile.
        """
        if is_limited:
            self._check_limits(prefix)
        self._prefixes[prefix.id] = prefix
        try:
            async with prefix.pinning:
                await self._pin(prefix, priority)
        except OutOfMemoryError as error:
            self._prefixes.pop(prefix.id, None)
            raise bad_request(str(error)) from None
        except BaseException:
            self._prefixes.pop(prefix.id, None)
            raise
        if prefix.id not in self._prefixes:
            raise ApiError(409, "The cached content was deleted while it was computed.")
        prefix.settled_s = time.monotonic()
        self.extend(prefix, ttl_s)

    def get(self, tenant: str, prefix_id: str, *, sees_all: bool = False) -> NamedPrefix:
        """A tenant's prefix; ApiError 404 for one that has expired, or is not its own."""
        found = self._prefixes.get(prefix_id)
        is_over = found is not None and (found.expires_s or math.inf) <= time.monotonic()
        if found is None or is_over or not (sees_all or found.tenant == tenant):
            raise ApiError(
                404,
                f"There is no cached content {prefix_id[:80]!r}, or it has expired.",
                param=_FIELD,
                code="cached_content_not_found",
            )
        return found

    def of(self, tenant: str | None) -> list[NamedPrefix]:
        """A tenant's prefixes, or those of all."""
        return [each for each in self._prefixes.values() if tenant in (None, each.tenant)]

    def extend(self, prefix: NamedPrefix, ttl_s: float | None) -> None:
        """Let it expire so long from now, or not at all."""
        prefix.expires_s = None if ttl_s is None else time.monotonic() + ttl_s
        if (timer := self._timers.pop(prefix.id, None)) is not None:
            timer.cancel()
        if ttl_s is not None:
            loop = asyncio.get_running_loop()
            self._timers[prefix.id] = loop.call_later(ttl_s, self.delete, prefix)

    def delete(self, prefix: NamedPrefix) -> None:
        """Let go of a prefix, whose KV stays cached as others' does."""
        self.settle([prefix])
        del self._prefixes[prefix.id]
        if (timer := self._timers.pop(prefix.id, None)) is not None:
            timer.cancel()
        if self._is_pinned(prefix) and prefix.pin is not None:
            self._engine.unpin_prefix(prefix.pin.number)

    def delete_tenant(self, tenant: str) -> int:
        """Let go of all of a tenant's; returns how many."""
        own = self.of(tenant)
        for prefix in own:
            self.delete(prefix)
        return len(own)

    async def keep_pinned(self, prefix: NamedPrefix, priority: int) -> None:
        """Pin it again where the engine was started again, as far as there is room."""
        async with prefix.pinning:  # once, whoever else waits for it
            if self._is_pinned(prefix) or prefix.id not in self._prefixes:
                return
            self.settle([prefix])
            try:
                await self._pin(prefix, priority)
            except (OutOfMemoryError, OverloadedError):
                prefix.pin = None  # requests still find what is cached

    def settle(self, prefixes: Iterable[NamedPrefix] | None = None) -> None:
        """Charge for what storage has taken until now."""
        now = time.monotonic()
        price = self._config.price_storage
        for prefix in list(self._prefixes.values() if prefixes is None else prefixes):
            hours = prefix.num_pinned * (now - prefix.settled_s) / _HOUR_S
            prefix.token_hours += hours
            prefix.settled_s = now
            if price is not None:
                self._charge(prefix.tenant, token_storage_cost(hours, price))

    def _check_limits(self, prefix: NamedPrefix) -> None:
        own, config = self.of(prefix.tenant), self._engine.config
        pool_tokens = config.num_blocks[0] * config.block_tokens if config.num_blocks else 0
        most_tokens = int(pool_tokens * self._config.cached_content_share)
        for what, total, most in (
            ("cached contents", len(own) + 1, self._config.max_cached_contents),
            ("cached tokens", sum(len(p.token_ids) for p in (*own, prefix)), most_tokens),
            ("bytes of cached contents", sum(p.num_bytes for p in (*own, prefix)), MAX_BYTES),
        ):
            if total > most:
                raise ApiError(429, f"A key may have {most} {what}.", code="rate_limit_exceeded")

    def _is_pinned(self, prefix: NamedPrefix) -> bool:
        return prefix.pin is not None and prefix.pin in self._engine.pinned_prefixes

    async def _pin(self, prefix: NamedPrefix, priority: int) -> None:
        prefix.pin = await self._engine.pin_prefix(
            prefix.token_ids,
            request_id=new_id("pin-"),
            adapter=prefix.adapter,
            cache_salt=prefix.salt,
            tenant=prefix.tenant,
            priority=priority,
        )
        if prefix.id not in self._prefixes and self._is_pinned(prefix):  # it was deleted meanwhile
            self._engine.unpin_prefix(prefix.pin.number)
