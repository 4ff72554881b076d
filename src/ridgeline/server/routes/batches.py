"""``/v1/batches``."""

from typing import Any

from ridgeline.server.context import Call
from ridgeline.server.errors import bad_request
from ridgeline.server.jobs.lines import ENDPOINTS
from ridgeline.server.replies import Reply
from ridgeline.server.routes.paging import page_limit, page_of
from ridgeline.server.schemas.batches import BatchRequest

WINDOW_S = 24 * 3600


async def create_batch(call: Call, request: BatchRequest) -> Reply:
    """Queue the lines of an uploaded file."""
    if request.endpoint not in ENDPOINTS:
        raise bad_request(f"endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    if request.output_expires_after is not None:
        name = "output_expires_after"
        raise bad_request(f"{name}: files do not expire; delete them.", name)
    call.server.check_taking_work()
    batch = await call.server.jobs.batches.create(
        call.caller.tenant,
        endpoint=request.endpoint,
        input_file=request.input_file_id,
        window=request.completion_window,
        window_s=WINDOW_S,
        metadata=request.metadata or {},
    )
    call.server.jobs.changed.set()
    return Reply(body=_openai(batch))


async def list_batches(call: Call) -> Reply:
    """The caller's batches, newest first."""
    found, has_more = await call.server.jobs.batches.list(
        call.caller.tenant, after=call.query.get("after") or None, limit=page_limit(call, 100)
    )
    return Reply(body=page_of([_openai(batch) for batch in found], has_more))


async def get_batch(call: Call) -> Reply:
    """One of them."""
    batches = call.server.jobs.batches
    return Reply(body=_openai(await batches.get(call.caller.tenant, call.path_params["batch_id"])))


async def cancel_batch(call: Call) -> Reply:
    """End a batch early; what is done by then can be read."""
    jobs = call.server.jobs
    batch = await jobs.batches.cancel(call.caller.tenant, call.path_params["batch_id"])
    jobs.changed.set()
    return Reply(body=_openai(batch))


def _openai(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch without what Anthropic's clients alone read."""
    return {name: value for name, value in batch.items() if name != "archived_at"}
