"""A client of OpenAI-compatible completions that costs little processor time.

One connection per request and HTTP/1.1 by hand: the load generator shares the machine with what it
measures, and general clients spend more on a chunk than a small model does on a token.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from urllib.parse import urlsplit

import msgspec

from ridgeline.bench.serve.prompts import Prompts, request_of
from ridgeline.bench.serve.targets import Piece, StatusError
from ridgeline.core.errors import InvalidRequestError, NetworkError

_LIMIT = 1 << 22
_MAX_ERROR_CHARS = 300
_REFUSED = (400, 404, 405, 415, 422, 501)  # the form of a request, not its sender or moment


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.is_shown or delta.reasoning or delta.reasoning_content)

    @property
    def is_shown(self) -> bool:
        return bool(self.text or (self.delta and self.delta.content))


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Message(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Message


_decode = msgspec.json.Decoder(_Chunk).decode


class HttpTarget:
    """``url`` is of the server or of its ``/v1``; ``model`` is what it calls the model."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        prompts: Prompts = Prompts.IDS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is not an http or https URL.")
        self._host = parts.hostname
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise InvalidRequestError(f"{url!r}: ports are 1 to 65535.") from None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._authority = parts.netloc.rpartition("@")[2]
        self._model, self._api_key = model, api_key
        self.prompts, self._headers = prompts, headers or {}

    async def models(self) -> list[str]:
        """Names of the models that are served there."""
        try:
            body = msgspec.json.decode(await self._whole("GET", "/v1/models", b""))
            return [str(entry["id"]) for entry in body["data"]]
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise NetworkError(f"{self._authority} does not list its models.") from error

    async def first_model(self) -> str:
        """The first of them.

        Raises:
            NetworkError: as `models`, or there is none for this key.
        """
        if not (names := await self.models()):
            raise NetworkError(f"{self._authority} lists no model that this key may use.")
        return names[0]

    async def get(self, path: str) -> bytes:
        """The whole answer to a GET."""
        return await self._whole("GET", path, b"")

    async def delete(self, path: str) -> bytes:
        """The whole answer to a DELETE."""
        return await self._whole("DELETE", path, b"")

    async def ask(self, path: str, body: Mapping[str, object]) -> bytes:
        """The whole answer to a request of this model."""
        return await self.post(path, {"model": self._model, **body})

    async def post(self, path: str, body: Mapping[str, object]) -> bytes:
        """The whole answer to a POST."""
        return await self._whole("POST", path, msgspec.json.encode(body))

    def with_model(self, model: str) -> "HttpTarget":
        """The same server, for another model."""
        self._model = model
        return self

    async def adapt(self, token_ids: tuple[int, ...]) -> None:
        """Ask in the first way that the endpoint takes: token ids, text, or a chat.

        Raises:
            NetworkError: it takes none of them, or cannot be asked at all.
        """
        refused: StatusError | None = None
        for self.prompts in Prompts:
            try:
                async with aclosing(self.stream(token_ids, 2)) as pieces:
                    async for _ in pieces:
                        pass
            except StatusError as error:
                if error.status not in _REFUSED:
                    raise
                refused = refused or error
            else:
                return
        assert refused is not None
        raise refused

    async def stream(
        self, token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        path, payload = request_of(self.prompts, self._model, token_ids, max_tokens)
        reader, writer = await self._request("POST", path, msgspec.json.encode(payload))
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
                    count = len(token_ids) or sum(choice.has_text for choice in chunk.choices)
                seen += count
                details = usage.prompt_tokens_details if usage else None
                cached = details.cached_tokens if details else None
                yield Piece(
                    num_tokens=count,
                    is_shown=any(choice.is_shown for choice in chunk.choices),
                    token_ids=token_ids,
                    num_prompt_tokens=usage.prompt_tokens if usage else None,
                    num_cached_tokens=cached,
                )
        finally:
            writer.close()

    async def _whole(self, method: str, path: str, body: bytes) -> bytes:
        return b"".join([part async for part in self.parts(method, path, body)])

    async def parts(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The answer's body as it comes."""
        reader, writer = await self._request(method, path, body)
        try:
            async for part in _body(reader, await _head(reader)):
                yield part
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
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror or str(error)
            raise NetworkError(f"{self._authority} cannot be reached: {reason}.") from error
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self._headers.items()),
        ]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """The headers of a successful answer; raises `NetworkError` for none, and `StatusError`."""
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
    code = status.split(" ")[1:2]
    if code != ["200"]:
        body = b"".join([part async for part in _body(reader, headers)])
        message = f"{status.partition(' ')[2]}: {_told(body)[:_MAX_ERROR_CHARS]}"
        raise StatusError(message, status=int(code[0]) if code and code[0].isdecimal() else 0)
    return headers


def _told(body: bytes) -> str:
    """The message of an error, or the body that has none."""
    try:
        return msgspec.json.decode(body, type=_Error).error.message
    except msgspec.DecodeError:
        return body.decode(errors="replace")


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
