"""Uploads: multipart bodies, streamed to disk within bounds."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ridgeline.core.encryption import Writer
from ridgeline.core.errors import DiskError
from ridgeline.server.body import ClientDisconnectedError, Receive, too_large
from ridgeline.server.errors import bad_request
from ridgeline.server.jobs.files import MAX_FILE_BYTES

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the caller is told

MAX_UPLOAD_BYTES = MAX_FILE_BYTES + (1 << 20)  # with the form around it
_INVALID = "The body is not valid multipart/form-data."
_MAX_BOUNDARY_BYTES = 70  # RFC 2046, section 5.1.1
_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 16
_MAX_HEADER_BYTES = 8192


class Upload:
    """Reads ``file`` into a temporary file and the other parts into ``fields``.

    ``writer`` makes what writes to that file once it is open; ``count`` is called with the bytes of
    each piece before it is written.
    """

    def __init__(
        self,
        content_type: bytes,
        temporary: Path,
        writer: Callable[[IO[bytes]], Writer] = Writer,
        count: Callable[[int], object] = lambda _: None,
    ) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise bad_request("The body must be multipart/form-data.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._temporary = temporary
        self._make_writer = writer
        self._count = count
        self._writer: Writer | None = None
        self._file: IO[bytes] | None = None
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._value = b""
        self._parts = 0
        self._is_file = False
        self._is_complete = False
        if len(boundary) > _MAX_BOUNDARY_BYTES:
            raise bad_request(_INVALID)
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return 0 if self._writer is None else self._writer.size

    async def read(self, receive: Receive) -> None:
        """Take the whole body; the file is synced when this returns.

        Raises:
            ApiError: the body is too large, or not as it should be.
            ClientDisconnectedError: the client went away.
            DiskError: there is no room.
        """
        received = 0
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                data = message.get("body", b"")
                received += len(data)
                if received > MAX_UPLOAD_BYTES:
                    raise too_large(MAX_FILE_BYTES)
                await asyncio.to_thread(self._parser.write, data)
                more = message.get("more_body", False)
            if not self._is_complete or self._file is None:
                raise bad_request("The body has no complete part called file.", "file")
            assert self._writer is not None
            self._writer.finish()
            self._file.flush()
            await asyncio.to_thread(os.fsync, self._file.fileno())
        except FormParserError:
            raise bad_request(_INVALID) from None
        except OSError as error:
            raise DiskError(f"The upload could not be stored: {error.strerror}.") from error
        finally:
            if self._file is not None:
                with suppress(OSError):  # what a full disk has refused is written once more
                    self._file.close()

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request("The body has too many parts.")
        self._headers, self._header, self._value = {}, [b"", b""], b""

    def _add_header(self, index: int, data: bytes) -> None:
        self._header[index] += data
        if len(self._header[index]) > _MAX_HEADER_BYTES:
            raise bad_request("A part has a header that is too long.")

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]
        if len(self._headers) > _MAX_PARTS:
            raise bad_request("A part has too many headers.")

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._file is not None:
                raise bad_request("The body has two files.", "file")
            self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")
            self._file = open(self._temporary, "xb")  # noqa: SIM115
            self._writer = self._make_writer(self._file)

    def _data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._is_file:
            assert self._writer is not None
            self._count(len(piece))
            self._writer.write(piece)
            if self.size > MAX_FILE_BYTES:
                raise too_large(MAX_FILE_BYTES)
            return
        self._value += piece
        if len(self._value) > _MAX_FIELD_BYTES:
            raise bad_request(f"{self._name[:80]}: the field is too long.", self._name[:80])

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name[:80]] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True
