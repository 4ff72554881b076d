"""The named prefix that a request goes on from."""

from ridgeline.server.context import Call
from ridgeline.server.errors import bad_request
from ridgeline.server.logprobs import token_text
from ridgeline.server.named_prefixes import NamedPrefix
from ridgeline.server.schemas.generation import Generation


def cached_content(call: Call, fields: Generation, model: str) -> NamedPrefix | None:
    """The prefix that a request names, in whichever field.

    Raises:
        ApiError: 404 if the caller has none of that id; 400 if it is another model's, or the
            request has another ``cache_salt``.
    """
    extra = fields.extra_body
    names = [fields.cached_content]
    if extra is not None:
        names += [extra.cached_content, extra.google.cached_content if extra.google else None]
    ids = {name for name in names if name is not None}
    if not ids:
        return None
    if len(ids) > 1:
        raise bad_request("A request may name one cached content.", "cached_content")
    prefix = call.server.prefixes.get(call.caller.tenant, ids.pop())
    if prefix.adapter != call.server.adapter(model):
        raise bad_request(
            f"This cached content is of the model {prefix.model!r}.", "cached_content"
        )
    if fields.cache_salt not in (None, prefix.cache_salt):
        raise bad_request("This cached content has another cache_salt.", "cache_salt")
    return prefix


async def check_prompts(
    call: Call, prefix: NamedPrefix, prompts: list[tuple[int, ...]], priority: int
) -> None:
    """Refuse prompts that do not begin as the prefix does, and see that it is in the engine.

    Raises:
        ApiError: 409 with the first token that differs.
    """
    for ids in prompts:
        prefix.check(ids, lambda token: token_text(call.server.tokenizer, token))
    await call.server.prefixes.keep_pinned(prefix, priority)
