"""The lines of a batch: what they must look like, how they are run, what comes out."""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ridgeline.core.errors import (
    EngineError,
    EngineUnavailableError,
    MachineError,
    OverloadedError,
)
from ridgeline.engine.stats import EngineStatus
from ridgeline.server.body import decode_body, decode_request
from ridgeline.server.context import Call, Server
from ridgeline.server.endpoint import Operation
from ridgeline.server.errors import ApiError, bad_request, to_api_error
from ridgeline.server.ids import new_id
from ridgeline.server.jobs.batches import Result
from ridgeline.server.jobs.files import MAX_INPUT_BYTES, MAX_LINE_BYTES
from ridgeline.server.keys import Caller
from ridgeline.server.pool.choice import of_model
from ridgeline.server.replies import Reply, encode
from ridgeline.server.routes.model_operations import model_operations

MAX_LINES = 50_000
_MAX_BLANK_LINES = 50_000
_MAX_ERRORS = 100
_ATTEMPTS = 3
_RETRY_S = 0.5
_MAX_RETRY_S = 30.0

ENDPOINTS = {each.path: each for each in model_operations() if each.in_batches}
_BODIES: dict[str, msgspec.json.Decoder[Any]] = {
    path: msgspec.json.Decoder(operation.request)
    for path, operation in ENDPOINTS.items()
    if operation.request is not None
}
# OpenAI's names for what is wrong with a line.
_CODES = {"invalid_json": "invalid_json_line", "missing_field": "missing_required_parameter"}


class BatchLine(Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of the input file; ``body`` is what would be posted to ``url``."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlace:
    """Where a line lies in its file, and whose it is."""

    number: int
    offset: int
    size: int
    custom_id: str


_LINE = msgspec.json.Decoder(BatchLine)


def read_lines(file: IO[bytes], endpoint: str) -> tuple[list[LinePlace], list[dict[str, Any]]]:
    """Check an input file; returns its lines and what is wrong with them.

    As at OpenAI, a file with a line that is no request at all is refused as a whole, before any of
    it runs; a request whose ``body`` is wrong gets its own answer, as it would online.
    """
    places: list[LinePlace] = []
    errors: list[dict[str, Any]] = []
    if file.seek(0, os.SEEK_END) > MAX_INPUT_BYTES:
        return [], [_error("too_large", f"A batch may have {MAX_INPUT_BYTES:,} bytes.", None)]
    file.seek(0)
    seen: set[str] = set()
    number = offset = num_blank = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        place = LinePlace(number=number, offset=offset, size=len(data), custom_id="")
        offset += len(data)
        if not data.strip():
            num_blank += 1
            if num_blank > _MAX_BLANK_LINES:
                text = f"{_MAX_BLANK_LINES} blank lines at the most."
                errors.append(_error("too_many", text, number))
                break
            continue
        if len(places) == MAX_LINES:
            errors.append(_error("too_many", f"{MAX_LINES} lines at the most.", number))
            break
        try:
            line = _check(data, endpoint)
            if line.custom_id in seen:
                raise bad_request("custom_id is there twice.", "custom_id", "duplicate_custom_id")
        except ApiError as error:
            code = _CODES.get(error.code or "", error.code) or "invalid_line"
            errors.append(_error(code, error.message, number, error.param))
            if len(errors) >= _MAX_ERRORS:
                break
            continue
        seen.add(line.custom_id)
        places.append(
            LinePlace(number=number, offset=place.offset, size=place.size, custom_id=line.custom_id)
        )
    if not places and not errors:
        errors.append(_error("empty_file", "The file has no requests.", None))
    return places, errors


def _check(data: bytes, endpoint: str) -> BatchLine:
    if len(data) > MAX_LINE_BYTES:
        raise bad_request("The line is too long.")
    line = decode_body(_LINE, data, name="The line")
    if line.url != endpoint:
        raise bad_request(f"The url is not the batch's endpoint {endpoint}.", "url", "invalid_url")
    return line


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def read_line(file: IO[bytes], place: LinePlace) -> BatchLine:
    """One line that has been checked before."""
    file.seek(place.offset)
    return _LINE.decode(file.read(place.size))


async def run_line(server: Server, caller: Caller, place: LinePlace, line: BatchLine) -> Result:
    """Run a line. While the engine takes no requests it waits; what fails inside is tried again.

    Raises:
        EngineError: the engine has stopped for good; the line has no result.
    """
    operation = ENDPOINTS[line.url]
    attempt = 0
    while True:
        call = Call(
            server=server,
            request_id=new_id("req-"),
            caller=caller,
            is_batch=True,
            prompt_field=operation.prompt_field,
            body_bytes=len(line.body),
        )
        try:
            reply = await _reply(operation, call, bytes(line.body))
        except Exception as error:
            _check_alive(server)
            is_busy = _is_busy(server, error)
            attempt += not is_busy
            if is_busy or (
                isinstance(error, EngineError | OverloadedError) and attempt < _ATTEMPTS
            ):
                await asyncio.sleep(_wait_s(error))
                continue
            failure = to_api_error(error, operation.prompt_field)
            body = encode(failure.body(operation.family, call.request_id))
            return _result(place, call.request_id, failure.status, body)
        return _result(place, call.request_id, reply.status, reply.encoded())


def _check_alive(server: Server) -> None:
    health = server.monitored.health()
    if health.status is EngineStatus.DEAD:
        raise EngineError(f"The engine has stopped: {health.reason.rstrip('.')}.")


def _is_busy(server: Server, error: Exception) -> bool:
    """Whether it is not the line's fault, so that it may wait for as long as it takes."""
    if isinstance(error, OverloadedError):
        # Refused by an engine that has nothing else to do, the line is more than may wait.
        return server.monitored.num_open_requests > 0
    return isinstance(error, EngineUnavailableError | MachineError)


def _wait_s(error: Exception) -> float:
    """Seconds to stay away before the next attempt."""
    wanted_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
    return min(max(wanted_s, _RETRY_S), _MAX_RETRY_S)


async def _reply(operation: Operation, call: Call, body: bytes) -> Reply:
    unknown_fields = call.server.config.unknown_fields
    request, _ = await call.read(decode_request, _BODIES[operation.path], body, unknown_fields)
    if getattr(request, "stream", None):
        raise bad_request("A batch does not stream.", "stream")
    choice = contextlib.nullcontext() if call.server.pool is None else of_model(call, request)
    async with choice:
        with call.admission:
            reply = await operation.handler(call, request)
    assert isinstance(reply, Reply)
    return reply


def _result(place: LinePlace, request_id: str, status: int, body: bytes) -> Result:
    entry = {
        "id": new_id("batch_req_"),
        "custom_id": place.custom_id,
        "response": {
            "status_code": status,
            "request_id": request_id,
            "body": msgspec.Raw(body),
        },
        "error": None,
    }
    return Result(line=place.number, is_error=status != 200, body=encode(entry))


def unanswered(place: LinePlace, code: str, message: str) -> Result:
    """What stands in the error file for a line that was not run."""
    entry = {
        "id": new_id("batch_req_"),
        "custom_id": place.custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Result(line=place.number, is_error=True, body=encode(entry))
