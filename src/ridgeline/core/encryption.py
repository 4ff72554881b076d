"""Encryption of what is kept on disk: AES-256-GCM, with one key for all of it.

As bytes: magic, salt, and chunks of 64 KiB, each with its tag. Every write has a key of its own,
derived from the salt (HKDF-SHA256, RFC 5869), and every chunk the nonce of its place: its number,
and whether it is the last (STREAM, Hoang et al. 2015). So chunks cannot be cut off or moved, and no
nonce comes twice. The name of what is written is authenticated with each chunk: contents cannot be
given each other's names.
"""

import base64
import binascii
import io
import os
import stat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from ridgeline.core.errors import CorruptFileError, MissingDependencyError, SettingsError
from ridgeline.core.extras import install_command
from ridgeline.core.rounding import ceil_div

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"RLENC001"
CHUNK_BYTES = 1 << 16
KEY_BYTES = 32
_SALT_BYTES = 32
_TAG_BYTES = 16
_START_BYTES = len(MAGIC) + _SALT_BYTES
_NOT_ENCRYPTED = "What was stored is not encrypted, or is cut short."


class Encryption:
    """Encrypts and decrypts contents by name; without a key it leaves them as they are.

    Raises:
        MissingDependencyError: the package cryptography is not installed.
    """

    def __init__(self, key: bytes | None = None) -> None:
        assert key is None or len(key) == KEY_BYTES
        self._key = key
        if key is not None:
            try:
                import cryptography  # noqa: F401
            except ImportError as error:
                raise MissingDependencyError(
                    f"Encryption needs cryptography: {install_command('encryption')}."
                ) from error

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | None) -> Self:
        """With the key that a file holds: 32 bytes, or 64 hexadecimal digits.

        Raises:
            SettingsError: it cannot be read, is open to others than its owner, or holds no key.
            MissingDependencyError: the package cryptography is not installed.
        """
        return cls() if path is None else cls(read_key(Path(path)))

    @property
    def is_on(self) -> bool:
        return self._key is not None

    def writer(self, file: IO[bytes], name: str) -> "Writer":
        """What writes to ``file`` under a name; it is whole after `Writer.finish`."""
        if self._key is None:
            return Writer(file)
        salt = os.urandom(_SALT_BYTES)
        file.write(MAGIC + salt)
        return _EncryptingWriter(file, _cipher(self._key, salt), name.encode())

    def reader(self, file: IO[bytes], name: str) -> IO[bytes]:
        """Reads what was written to a seekable file under a name; it closes the file.

        Raises (when it is read, as well):
            CorruptFileError: the file is damaged, or has another name or key.
        """
        if self._key is None:
            return file
        start = file.read(_START_BYTES)
        if len(start) < _START_BYTES or not start.startswith(MAGIC):
            raise CorruptFileError(_NOT_ENCRYPTED)
        cipher = _cipher(self._key, start[len(MAGIC) :])
        return io.BufferedReader(_Decrypting(file, cipher, name.encode()), CHUNK_BYTES)

    def seal(self, content: bytes, name: str) -> bytes:
        """A content encrypted under a name, in one piece."""
        file = io.BytesIO()
        writer = self.writer(file, name)
        writer.write(content)
        writer.finish()
        return file.getvalue()

    def unseal(self, sealed: bytes, name: str) -> bytes:
        """The inverse of `seal`; raises what `reader` raises."""
        return self.reader(io.BytesIO(sealed), name).read()

    def seal_text(self, text: str, name: str) -> str:
        """A text encrypted under a name, as base64."""
        if self._key is None:
            return text
        return base64.b64encode(self.seal(text.encode(), name)).decode()

    def unseal_text(self, sealed: str, name: str) -> str:
        """The inverse of `seal_text`; raises what `reader` raises."""
        if self._key is None:
            return sealed
        try:
            content = base64.b64decode(sealed, validate=True)
        except binascii.Error:
            raise CorruptFileError(_NOT_ENCRYPTED) from None
        return self.unseal(content, name).decode()


class Writer:
    """Writes to a file and counts; ``size`` is in bytes of the content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0

    def write(self, content: bytes) -> None:
        self.size += len(content)
        self._file.write(content)

    def finish(self) -> None:
        """Mark the end, after the last write; the file stays open."""


class _EncryptingWriter(Writer):
    """Holds back a chunk at the most, since the last one has to be known as the last."""

    def __init__(self, file: IO[bytes], cipher: "AESGCM", name: bytes) -> None:
        super().__init__(file)
        self._cipher, self._name = cipher, name
        self._held = bytearray()
        self._number = 0

    def write(self, content: bytes) -> None:
        self.size += len(content)
        self._held += content
        done = 0
        while len(self._held) - done > CHUNK_BYTES:
            self._write_chunk(self._held[done : done + CHUNK_BYTES], is_last=False)
            done += CHUNK_BYTES
        del self._held[:done]

    def finish(self) -> None:
        self._write_chunk(self._held, is_last=True)
        self._held = bytearray()

    def _write_chunk(self, chunk: bytearray, *, is_last: bool) -> None:
        nonce = _nonce(self._number, is_last=is_last)
        self._file.write(self._cipher.encrypt(nonce, chunk, self._name))
        self._number += 1


class _Decrypting(io.RawIOBase):
    """A chunk at a time, from wherever it is wanted."""

    def __init__(self, file: IO[bytes], cipher: "AESGCM", name: bytes) -> None:
        self._file, self._cipher, self._name = file, cipher, name
        num_bytes = file.seek(0, os.SEEK_END) - _START_BYTES
        self._num_chunks = max(1, ceil_div(num_bytes, CHUNK_BYTES + _TAG_BYTES))
        self._size = num_bytes - self._num_chunks * _TAG_BYTES
        self._position = 0
        self._number, self._chunk = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        number, start = divmod(self._position, CHUNK_BYTES)
        # The end of what fills its last chunk is that chunk's end; an empty content has one, too.
        number = min(number, self._num_chunks - 1)
        if number != self._number:
            self._chunk, self._number = self._read_chunk(number), number
        if self._position >= self._size:
            return 0
        piece = self._chunk[start : start + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def readall(self) -> bytes:
        pieces = []
        while piece := self.read(CHUNK_BYTES):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_chunk(self, number: int) -> bytes:
        from cryptography.exceptions import InvalidTag

        self._file.seek(_START_BYTES + number * (CHUNK_BYTES + _TAG_BYTES))
        sealed = self._file.read(CHUNK_BYTES + _TAG_BYTES)
        nonce = _nonce(number, is_last=number == self._num_chunks - 1)
        try:
            return self._cipher.decrypt(nonce, sealed, self._name)
        except (InvalidTag, ValueError):
            raise CorruptFileError(
                "What was stored is damaged, or encrypted under another name or key."
            ) from None


def _cipher(key: bytes, salt: bytes) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derive = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=MAGIC)
    return AESGCM(derive.derive(key))


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def read_key(path: Path) -> bytes:
    """The 32 bytes of a key file, which must be its owner's alone.

    Raises:
        SettingsError: it cannot be read, is open to others, or is not a key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(1024) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise SettingsError(f"The key {path} cannot be read: {error.strerror}.") from error
    if mode & 0o077:
        raise SettingsError(
            f"The key {path} is open to other users (mode {stat.S_IMODE(mode):04o}); make it 0600."
        )
    if len(content) == KEY_BYTES:
        return content
    try:
        key = bytes.fromhex(content.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(
            f"The key {path} must hold 32 bytes, or 64 hexadecimal digits (openssl rand -hex 32)."
        )
    return key
