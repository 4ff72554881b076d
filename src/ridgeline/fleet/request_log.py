"""A router's log of requests: what came and when, and with its text what it takes to ask again.

A line for each whole answer. Without ``body`` it has lengths and times, as traces have them
(`read_trace`), and no text: ``digest`` says of an answer whether another is the same.
"""

import hashlib
import logging
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.philox import derive_seed
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.forwarding import MOST_WHOLE_BYTES, Client, Send
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.upstream import AnswerHead
from ridgeline.server.sampling import RANDOM_SEED

_log = logging.getLogger(__name__)
UNLOGGED = b"x-ridgeline-unlogged"  # header of an admin's requests that only check or repeat


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request and its answer. ``at_s`` is in seconds since 1970, ``ttft_s`` of a stream alone.

    ``seed`` is what it takes where ``body`` has none: ``None`` if no one knows it. Tokens of a
    prompt are counted by its bytes where the answer does not say.
    """

    at_s: float
    path: str
    engine: str
    prompt_tokens: int
    output_tokens: int
    seconds: float
    ttft_s: float | None = None
    digest: str | None = None
    seed: int | None = None
    body: dict[str, Any] | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether the same output can be asked for again."""
        body = self.body or {}
        several = isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int)
        drawn = self._has_no_seed and (self.seed is None or several)
        return (
            self.digest is not None and bool(body) and (not drawn or body.get("temperature") == 0)
        )

    @property
    def again(self) -> dict[str, Any]:
        """The body that asks for it again."""
        assert self.body is not None
        if self.seed is None or not self._has_no_seed:
            return self.body
        return self.body | {"seed": self.seed}

    @property
    def _has_no_seed(self) -> bool:
        return (self.body or {}).get("seed") in (None, RANDOM_SEED)


class ReadAnswer(msgspec.Struct, frozen=True):
    """What an answer of completions or of a chat says, whatever the borders of its events are."""

    digest: str
    prompt_tokens: int
    output_tokens: int


def read_answer(data: bytes) -> ReadAnswer | None:
    """Choices and usage of an answer or of a stream of events; ``None`` if there are none."""
    parts = [data]
    if data.startswith((b"data:", b":")):
        lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
        parts = [line.removeprefix(b"data: ") for line in lines]
    usage: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    num_pieces = 0  # mostly a token each, for streams that tell no usage
    try:
        for part in parts:
            event = msgspec.json.decode(part, type=dict[str, Any])
            usage = event.get("usage") or usage
            _add(choices, {"choices": event.get("choices") or []})
            num_pieces += bool(event.get("choices"))
    except (msgspec.DecodeError, TypeError, AttributeError):
        return None
    if not choices:
        return None
    text = msgspec.json.encode(choices, order="deterministic")
    counts = (usage.get(f"{name}_tokens") for name in ("prompt", "completion"))
    prompt, output = (count if isinstance(count, int) else 0 for count in counts)
    digest = hashlib.sha256(text).hexdigest()[:32]
    return ReadAnswer(digest, prompt, output or num_pieces)


def _add(known: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Put the next part of an answer behind those before it."""
    for name, value in new.items():
        if value in (None, "", []):
            continue
        if isinstance(value, Mapping):
            _add(known.setdefault(name, {}), value)
        elif isinstance(value, list) and isinstance(value[0], Mapping) and "index" in value[0]:
            for each in value:  # choices, or calls of tools
                rest = {key: one for key, one in each.items() if key not in ("index", "id")}
                _add(known.setdefault(f"{name} {each['index']}", {}), rest)
        else:
            if isinstance(value, list):  # calls of tools in whole answers have no index
                value = [
                    {key: one for key, one in each.items() if key != "id"}
                    if isinstance(each, Mapping)
                    else each
                    for each in value
                ]
            joins = isinstance(value, str | list) and name in known
            known[name] = known[name] + value if joins else value


class RecordedClient(Client):
    """A client whose answer is remembered, up to `MOST_WHOLE_BYTES`."""

    def __init__(self, scope: Any, send: Send) -> None:
        super().__init__(scope, send)
        self.at_s, self._begin_s = time.time(), time.monotonic()
        self.engine = ""
        self.ttft_s: float | None = None
        self.status = 0
        self._parts: list[bytes] = []
        self._num_bytes = 0

    async def begin(self, head: AnswerHead, engine: RoutedEngine) -> None:
        self.status, self.engine = head.status, engine.name
        await super().begin(head, engine)

    def write(self, data: bytes) -> bool:
        if data and self.ttft_s is None:
            self.ttft_s = time.monotonic() - self._begin_s
        self._keep(data)
        return super().write(data)

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status = status
        self.engine = dict(headers).get(b"x-ridgeline-engine", b"").decode()
        self._keep(body)
        await super().whole(status, headers, body)

    def _keep(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= MOST_WHOLE_BYTES:
            self._parts.append(data)

    def logged(self, request: RoutedRequest, *, has_seed: bool, with_text: bool) -> LoggedRequest:
        """What is known of the request once its answer is whole."""
        is_read = request.is_continued and self._num_bytes <= MOST_WHOLE_BYTES
        answer = read_answer(b"".join(self._parts)) if is_read else None
        found = answer or ReadAnswer("", 0, 0)
        return LoggedRequest(
            at_s=round(self.at_s, 4),
            path=request.path,
            engine=self.engine,
            prompt_tokens=found.prompt_tokens or request.wanted.prompt_tokens,
            output_tokens=found.output_tokens or request.wanted.output_tokens,
            seconds=round(time.monotonic() - self._begin_s, 4),
            ttft_s=None if self.ttft_s is None else round(self.ttft_s, 4),
            digest=found.digest or None,
            seed=derive_seed(request.seed, 0) if has_seed else None,
            body=msgspec.json.decode(request.body) if with_text and found.digest else None,
        )


class RequestLog:
    """The file, which is its owner's alone and is added to.

    Raises:
        SettingsError: it cannot be written.
    """

    def __init__(self, path: str, *, with_text: bool) -> None:
        self._path, self._with_text = path, with_text
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:  # it was there
                os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise SettingsError(
                f"request_log {path} cannot be written: {error.strerror}."
            ) from None
        self._file = os.fdopen(descriptor, "ab", buffering=0)

    def note(self, request: RoutedRequest, client: RecordedClient, *, has_seed: bool) -> None:
        """Add a line; a disk that takes none is told, and costs no request."""
        line = client.logged(request, has_seed=has_seed, with_text=self._with_text)
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            _log.error("The request log %s lacks a line: %s.", self._path, error.strerror)

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[LoggedRequest]:
    """The requests of a log, by their time.

    Raises:
        InvalidRequestError: it cannot be read, or a line is something else.
    """
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=LoggedRequest))
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"{path}, line {number}: {error}") from None
    if not found:
        raise InvalidRequestError(f"{path} is empty.")
    return sorted(found, key=lambda each: each.at_s)
