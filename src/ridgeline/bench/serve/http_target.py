"""A client of OpenAI-compatible completions that costs little processor time.

One connection per request and HTTP/1.1 by hand: the load generator shares the machine with what it
measures, and general clients spend more on a chunk than a small model does on a token.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import urlsplit

import msgspec

from ridgeline.bench.serve.targets import Piece
from ridgeline.core.errors import InvalidRequestError, NetworkError

_LIMIT = 1 << 22
_MAX_ERROR_CHARS = 300


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class HttpTarget:
    """``url`` is of the server or of its ``/v1``; ``model`` is what it calls the model."""

    def __init__(self, url: str, *, model: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is not an http or https URL.")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._authority = parts.netloc.rpartition("@")[2]
        self._model, self._api_key = model, api_key

    async def models(self) -> list[str]:
        """Names of the models that are served there."""
        reader, writer = await self._request("GET", "/v1/models", b"")
        try:
            body = b"".join([part async for part in _body(reader, await _head(reader))])
            return [str(entry["id"]) for entry in msgspec.json.decode(body)["data"]]
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise NetworkError(f"{self._authority} does not list its models.") from error
        finally:
            writer.close()

    def with_model(self, model: str) -> "HttpTarget":
        """The same server, for another model."""
        self._model = model
        return self

    async def stream(
        self, token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        payload = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        reader, writer = await self._request(
            "POST", "/v1/completions", msgspec.json.encode(payload)
        )
        try:
            seen = 0
            async for event in _events(_body(reader, await _head(reader))):
                chunk = _decode(event)
                usage = chunk.usage
                token_ids = tuple(t for choice in chunk.choices for t in choice.token_ids or ())
                total = usage.completion_tokens if usage else None
                if total is not None:
                    count = max(0, total - seen)
                else:
                    count = len(token_ids) or sum(bool(choice.text) for choice in chunk.choices)
                seen += count
                details = usage.prompt_tokens_details if usage else None
                cached = details.cached_tokens if details else None
                yield Piece(num_tokens=count, token_ids=token_ids, num_cached_tokens=cached)
        finally:
            writer.close()

    async def _request(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=_LIMIT
            )
        except OSError as error:
            raise NetworkError(f"{self._authority} cannot be reached: {error}") from error
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """The headers of a successful answer; raises `NetworkError` for another one."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
        raise NetworkError("The server closed the connection without an answer.") from error
    status, *lines = head.split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, colon, value in (line.partition(":") for line in lines)
        if colon
    }
    if status.split(" ")[1:2] != ["200"]:
        body = b"".join([part async for part in _body(reader, headers)])
        text = body.decode(errors="replace")[:_MAX_ERROR_CHARS]
        raise NetworkError(f"{status.partition(' ')[2]}: {text}")
    return headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body in parts as they come; raises `NetworkError` if it is cut short."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while part := await reader.read(_LIMIT):
                yield part
    except (asyncio.IncompleteReadError, ValueError, OSError) as error:
        raise NetworkError("The answer was cut short.") from error


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, up to ``[DONE]``."""
    buffer = b""
    async for part in body:
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield data
