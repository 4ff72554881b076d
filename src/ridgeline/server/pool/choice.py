"""Which of several models a call is for, and for how long that one is kept."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ridgeline.core.durations import parse_seconds
from ridgeline.core.errors import EngineUnavailableError
from ridgeline.server.context import Call
from ridgeline.server.errors import ApiFamily, bad_request

LATEST_TAG = ":latest"  # which Ollama puts after names without a tag
_MAX_CHARS = 32


@contextlib.asynccontextmanager
async def of_model(call: Call, request: Any = None) -> AsyncIterator[None]:
    """Within it the call has the server of the model that it names, by its body or its query; of
    the first one if it names none. ``keep_alive`` is Ollama's.

    Raises what `Server.model_for` raises, and ApiError 400 for a ``keep_alive`` that is no time.
    """
    front = call.server
    assert front.pool is not None
    name = getattr(request, "model", None) or getattr(request, "name", None)
    name = name or call.query.get("model")
    if name and call.family is ApiFamily.OLLAMA and name not in front.model_names:
        name = name.removesuffix(LATEST_TAG)
    keep_alive = getattr(request, "keep_alive", None)
    keep_s = None if keep_alive is None else _seconds(keep_alive)
    model = front.view_of(front.check_model(name, call.caller)).model
    assert model is not None
    if keep_s == 0 and getattr(request, "asks_nothing", False):
        await front.pool.unload(model)
        yield
        return
    if call.is_probe and model.state != "loaded":
        raise EngineUnavailableError(f"{model.name} is not loaded.")
    async with front.model_for(call, name):
        if keep_s is not None:
            call.server.keep(keep_s)
        yield


def _seconds(keep_alive: str | float) -> float:
    try:
        return parse_seconds(str(keep_alive)[:_MAX_CHARS])
    except ValueError:
        text = "keep_alive must be seconds, or a time such as 10m; below 0 is for ever."
        raise bad_request(text, "keep_alive") from None
