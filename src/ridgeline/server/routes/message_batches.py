"""``/v1/messages/batches``: Anthropic's view of batches whose lines are messages."""

import asyncio
import io
from collections.abc import AsyncGenerator, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ridgeline.server.context import Call
from ridgeline.server.errors import ApiError, ApiFamily, bad_request
from ridgeline.server.jobs.database import TERMINAL
from ridgeline.server.jobs.files import StoredFile
from ridgeline.server.jobs.lines import BatchLine, read_lines
from ridgeline.server.replies import EventStream, Reply, encode
from ridgeline.server.routes.batches import WINDOW_S
from ridgeline.server.routes.paging import page_ends, page_limit, page_of
from ridgeline.server.schemas.batches import MessageBatchRequest

_PREFIX = "msgbatch_"
_URL = "/v1/messages"
_READ_BYTES = 1 << 18
_ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")
_NOT_RUN = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_OF_THE_REST = {"cancelled": "canceled", "expired": "expired"}  # by how the batch ended


class _Answered(Struct):
    status_code: int
    body: Raw


class _NotRun(Struct):
    code: str


class _InputLine(Struct):
    custom_id: str


class _OutputLine(Struct):
    """A line of an output or an error file."""

    custom_id: str
    response: _Answered | None
    error: _NotRun | None


_OUTPUT_LINE = msgspec.json.Decoder(_OutputLine)


async def create_message_batch(call: Call, request: MessageBatchRequest) -> Reply:
    """Queue messages as the lines of a file, which counts towards the key's storage."""
    call.server.check_taking_work()
    jobs, tenant = call.server.jobs, call.caller.tenant
    lines = await call.server.in_thread(_input_lines, request)
    batch = await jobs.batches.create_with_input(
        tenant,
        lines,
        endpoint=_URL,
        window="24h",
        window_s=WINDOW_S,
        total=len(request.requests),
        prefix=_PREFIX,
    )
    jobs.changed.set()
    return Reply(body=_message_batch(batch))


async def list_message_batches(call: Call) -> Reply:
    """The caller's, newest first."""
    after, before = page_ends(call)
    found, has_more = await call.server.jobs.batches.list(
        call.caller.tenant,
        after=after,
        before=before,
        limit=page_limit(call, 1000),
        prefix=_PREFIX,
        params=("after_id", "before_id"),
    )
    return Reply(body=page_of([_message_batch(batch) for batch in found], has_more))


async def get_message_batch(call: Call) -> Reply:
    """One of them."""
    return Reply(body=_message_batch(await _batch(call)))


async def cancel_message_batch(call: Call) -> Reply:
    """End a batch early; what is done by then is among its results."""
    jobs = call.server.jobs
    batch = await jobs.batches.cancel(call.caller.tenant, (await _batch(call))["id"])
    jobs.changed.set()
    return Reply(body=_message_batch(batch))


async def delete_message_batch(call: Call) -> Reply:
    """Delete a batch that is over, with its results."""
    batch_id = (await _batch(call))["id"]
    await call.server.jobs.batches.delete(call.caller.tenant, batch_id)
    return Reply(body={"id": batch_id, "type": "message_batch_deleted"})


async def message_batch_results(call: Call) -> EventStream:
    """What came of each message, a JSON object a line."""
    batch = await _batch(call)
    if batch["status"] not in TERMINAL:
        raise ApiError(409, "The batch is not over; its results come at its end.")
    ids = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name] is not None]
    if batch["errors"] is not None:  # there was no room for the results of all that it reads
        ids.append(batch["input_file_id"])
    try:
        stored = [await call.server.jobs.files.get(call.caller.tenant, each) for each in ids]
    except ApiError:
        raise ApiError(
            404, "A file of its results was deleted; what is left is among /v1/files."
        ) from None
    return EventStream(events=_results(call, batch, stored), is_lines=True)


async def _batch(call: Call) -> dict[str, Any]:
    batch_id = call.path_params["batch_id"]
    if not batch_id.startswith(_PREFIX):
        raise ApiError(404, "There is no such batch.")
    return await call.server.jobs.batches.get(call.caller.tenant, batch_id)


def _input_lines(request: MessageBatchRequest) -> bytes:
    """The file that a batch reads; ApiError 400 if a request of it could not be run."""
    lines = b"".join(
        encode(
            BatchLine(
                custom_id=each.custom_id,
                method="POST",
                url=_URL,
                body=Raw(msgspec.json.format(each.params, indent=-1)),  # on one line
            )
        )
        + b"\n"
        for each in request.requests
    )
    _, problems = read_lines(io.BytesIO(lines), _URL)
    if problems:
        line, message = problems[0]["line"], problems[0]["message"]
        where = "requests" if line is None else f"requests[{line - 1}]"
        raise bad_request(f"{where}: {message}", where)
    return lines


async def _results(
    call: Call, batch: dict[str, Any], stored: Sequence[StoredFile]
) -> AsyncGenerator[bytes, None]:
    told: set[str] = set()
    for each in stored:
        is_input = each.id == batch["input_file_id"]
        file = await asyncio.to_thread(call.server.jobs.files.reader, each.tenant, each.id)
        with file:
            while lines := await asyncio.to_thread(file.readlines, _READ_BYTES):
                if is_input:
                    found = _untold(call, batch, lines, told)
                else:
                    found = [_result(line) for line in lines]
                    told.update(each["custom_id"] for each in found)
                yield b"".join(encode(each) + b"\n" for each in found)


def _untold(
    call: Call, batch: dict[str, Any], lines: Sequence[bytes], told: Collection[str]
) -> list[dict[str, Any]]:
    """What becomes of messages for whose results there was no room."""
    result: dict[str, Any]
    if (kind := _OF_THE_REST.get(batch["status"])) is not None:
        result = {"type": kind}
    else:
        error = ApiError(413, batch["errors"]["data"][0]["message"])
        result = {"type": "errored", "error": error.body(ApiFamily.ANTHROPIC, call.request_id)}
    ids = (msgspec.json.decode(line, type=_InputLine).custom_id for line in lines)
    return [{"custom_id": each, "result": result} for each in ids if each not in told]


def _result(line: bytes) -> dict[str, Any]:
    found = _OUTPUT_LINE.decode(line)
    if found.response is None:
        assert found.error is not None
        result: dict[str, Any] = {"type": _NOT_RUN[found.error.code]}
    elif found.response.status_code == 200:
        result = {"type": "succeeded", "message": found.response.body}
    else:
        result = {"type": "errored", "error": found.response.body}
    return {"custom_id": found.custom_id, "result": result}


def _message_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as Anthropic's clients read it: requests are counted by their results at its end."""
    status, counts = batch["status"], batch["request_counts"]
    is_over = status in TERMINAL
    rest = counts["total"] - counts["completed"] - counts["failed"]
    open_status = "canceling" if status == "cancelling" else "in_progress"
    url = f"{_URL}/batches/{batch['id']}"
    return {
        "id": batch["id"],
        "type": "message_batch",
        "processing_status": "ended" if is_over else open_status,
        "request_counts": {
            "processing": 0 if is_over else counts["total"],
            "succeeded": counts["completed"] if is_over else 0,
            "errored": counts["failed"] + (rest if status == "failed" else 0) if is_over else 0,
            "canceled": rest if status == "cancelled" else 0,
            "expired": rest if status == "expired" else 0,
        },
        "created_at": _date(batch["created_at"]),
        "expires_at": _date(batch["expires_at"]),
        "ended_at": _date(next((batch[name] for name in _ENDS if batch[name] is not None), None)),
        "cancel_initiated_at": _date(batch["cancelling_at"]),
        "archived_at": _date(batch["archived_at"]),
        "results_url": f"{url}/results" if is_over else None,
    }


def _date(seconds: int | None) -> str | None:
    """A time since the epoch as RFC 3339 has it."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
