"""The lines of a batch: what they must look like, how they are run, what comes out."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ridgeline.core.errors import EngineError, EngineUnavailableError, MachineError
from ridgeline.server.body import decode_body
from ridgeline.server.context import Call, Server, new_id
from ridgeline.server.errors import ApiError, Family, to_api_error
from ridgeline.server.jobs.batches import Result
from ridgeline.server.keys import Caller
from ridgeline.server.replies import Reply, encode
from ridgeline.server.routes.chat import chat
from ridgeline.server.routes.completions import completions
from ridgeline.server.routes.plain import embeddings
from ridgeline.server.routes.responses import responses
from ridgeline.server.schemas.chat import ChatRequest
from ridgeline.server.schemas.completions import CompletionRequest
from ridgeline.server.schemas.plain import EmbeddingRequest
from ridgeline.server.schemas.responses import ResponsesRequest

MAX_LINES = 50_000
MAX_BYTES = 200 << 20
_MAX_LINE_BYTES = 16 << 20
_MAX_ERRORS = 100
_ATTEMPTS = 3
_RETRY_S = 0.5

Handler = Callable[[Call, Any], Coroutine[Any, Any, Any]]
ENDPOINTS: dict[str, tuple[Handler, type]] = {
    "/v1/completions": (completions, CompletionRequest),
    "/v1/chat/completions": (chat, ChatRequest),
    "/v1/embeddings": (embeddings, EmbeddingRequest),
    "/v1/responses": (responses, ResponsesRequest),
}


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


def read_lines(path: Path, endpoint: str) -> tuple[list[LinePlace], list[dict[str, Any]]]:
    """Check the whole of an input file; returns its lines and what is wrong with them."""
    places: list[LinePlace] = []
    errors: list[dict[str, Any]] = []
    if path.stat().st_size > MAX_BYTES:
        return [], [_error("too_large", f"A batch may have {MAX_BYTES:,} bytes.", None)]
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ENDPOINTS[endpoint][1])
    seen: set[str] = set()
    with open(path, "rb") as file:
        number = offset = 0
        while data := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            place = LinePlace(number=number, offset=offset, size=len(data), custom_id="")
            offset += len(data)
            if not data.strip():
                continue
            if len(places) == MAX_LINES:
                errors.append(_error("too_many", f"{MAX_LINES} lines at the most.", number))
                break
            try:
                line = _check(data, endpoint, decoder)
                if line.custom_id in seen:
                    raise ApiError(400, "custom_id is there twice.", param="custom_id")
            except ApiError as error:
                errors.append(_error("invalid_line", error.message, number, error.param))
                if len(errors) >= _MAX_ERRORS:
                    break
                continue
            seen.add(line.custom_id)
            places.append(
                LinePlace(
                    number=number, offset=place.offset, size=place.size, custom_id=line.custom_id
                )
            )
    if not places and not errors:
        errors.append(_error("empty_file", "The file has no requests.", None))
    return places, errors


def _check(data: bytes, endpoint: str, decoder: msgspec.json.Decoder[Any]) -> BatchLine:
    if len(data) > _MAX_LINE_BYTES:
        raise ApiError(400, "The line is too long.")
    line = decode_body(_LINE, data)
    if line.url != endpoint:
        raise ApiError(400, f"The url is not the batch's endpoint {endpoint}.", param="url")
    body = decode_body(decoder, bytes(line.body))
    if getattr(body, "stream", None):
        raise ApiError(400, "A batch does not stream.", param="body.stream")
    return line


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}


def read_line(path: Path, place: LinePlace) -> BatchLine:
    """One line that has been checked before."""
    with open(path, "rb") as file:
        file.seek(place.offset)
        return _LINE.decode(file.read(place.size))


async def run_line(server: Server, caller: Caller, place: LinePlace, line: BatchLine) -> Result:
    """Run a line. While the engine takes no requests it waits; what fails inside is tried again."""
    handler, schema = ENDPOINTS[line.url]
    attempt = 0
    while True:
        call = Call(server=server, request_id=new_id("req-"), caller=caller, is_batch=True)
        try:
            reply = await handler(call, decode_body(msgspec.json.Decoder(schema), bytes(line.body)))
        except Exception as error:
            is_busy = isinstance(error, EngineUnavailableError | MachineError)
            is_full = isinstance(error, ApiError) and error.status == 429
            if is_busy or is_full:
                await asyncio.sleep(_RETRY_S)
                continue
            attempt += 1
            if isinstance(error, EngineError) and attempt < _ATTEMPTS:
                continue
            failure = to_api_error(error)
            body = encode(failure.body(Family.OPENAI, call.request_id))
            return _result(place, call.request_id, failure.status, body)
        assert isinstance(reply, Reply)
        return _result(place, call.request_id, reply.status, reply.encoded())


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
