"""What is encrypted comes back whole under its own name and key, or not at all."""

import io
import os
import sys
import tracemalloc

import pytest

from ridgeline.core.encryption import CHUNK_BYTES, Encryption
from ridgeline.core.errors import CorruptFileError, MissingDependencyError, SettingsError

KEY = bytes(range(32))
SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)
STORED_CHUNK = CHUNK_BYTES + 16


@pytest.fixture
def encryption():
    return Encryption(KEY)


@pytest.mark.parametrize("size", SIZES)
def test_contents_of_every_size_come_back(encryption, size):
    content = os.urandom(size)
    sealed = encryption.seal(content, "a")
    assert encryption.unseal(sealed, "a") == content
    assert size < 16 or content[:16] not in sealed
    reader = encryption.reader(io.BytesIO(sealed), "a")
    assert reader.seek(0, os.SEEK_END) == size
    for offset in (0, size // 2, size):
        reader.seek(offset)
        assert reader.read() == content[offset:]


def test_pieces_make_the_same_content_as_one(encryption):
    content = os.urandom(2 * CHUNK_BYTES + 100)
    file = io.BytesIO()
    writer = encryption.writer(file, "a")
    for start in range(0, len(content), 999):
        writer.write(content[start : start + 999])
    writer.finish()
    assert writer.size == len(content)
    assert encryption.unseal(file.getvalue(), "a") == content


def test_the_same_content_is_never_written_the_same(encryption):
    assert len({encryption.seal(b"text", "a") for _ in range(100)}) == 100


def cut_to(size):
    return lambda sealed: sealed[:size]


def swap_chunks(sealed):
    start = sealed[:40]
    first, second = (
        sealed[40 : 40 + STORED_CHUNK],
        sealed[40 + STORED_CHUNK : 40 + 2 * STORED_CHUNK],
    )
    return start + second + first + sealed[40 + 2 * STORED_CHUNK :]


def without_a_chunk(sealed):
    return sealed[:40] + sealed[40 + STORED_CHUNK :]


def flip(index):
    def change(sealed):
        damaged = bytearray(sealed)
        damaged[index] ^= 1
        return bytes(damaged)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(cut_to(size) for size in (0, 7, 40, 41, 40 + STORED_CHUNK, 40 + 2 * STORED_CHUNK, -1)),
        *(flip(index) for index in (0, 8, 39, 40, 40 + CHUNK_BYTES, 40 + STORED_CHUNK, -1)),
        swap_chunks,
        without_a_chunk,
        lambda sealed: sealed + b"x",
        lambda sealed: sealed + sealed[-16:],
        lambda _: b"plain text",
    ],
)
def test_damage_of_every_kind_is_found(encryption, change):
    sealed = encryption.seal(os.urandom(2 * CHUNK_BYTES + 5), "a")
    with pytest.raises(CorruptFileError):
        encryption.unseal(change(sealed), "a")


def test_another_name_and_another_key_read_nothing(encryption):
    sealed = encryption.seal(b"text", "a")
    with pytest.raises(CorruptFileError):
        encryption.unseal(sealed, "b")
    with pytest.raises(CorruptFileError):
        Encryption(bytes(32)).unseal(sealed, "a")
    text = encryption.seal_text("text", "a")
    assert encryption.unseal_text(text, "a") == "text"
    with pytest.raises(CorruptFileError):
        encryption.unseal_text("text", "a")


def test_a_large_content_is_not_held_in_memory(encryption):
    piece = os.urandom(1 << 16)
    with open(os.devnull, "wb") as file:
        writer = encryption.writer(file, "a")
        tracemalloc.start()
        for _ in range(200):
            writer.write(piece)
        writer.finish()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 * len(piece)


def test_without_a_key_contents_stay_as_they_are():
    plain = Encryption.from_file(None)
    assert plain.seal(b"text", "a") == b"text"
    assert plain.unseal(b"text", "b") == b"text"
    assert plain.unseal_text(plain.seal_text("text", "a"), "a") == "text"


@pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
def test_a_key_is_32_bytes_or_their_digits(tmp_path, content, encryption):
    path = key_file(tmp_path, content)
    sealed = Encryption.from_file(path).seal(b"text", "a")
    assert encryption.unseal(sealed, "a") == b"text"


@pytest.mark.parametrize(
    "content", [b"", b"short", KEY + b"x", KEY.hex()[:-1].encode(), b"\xff" * 64]
)
def test_what_is_no_key_is_refused(tmp_path, content):
    with pytest.raises(SettingsError, match="must hold 32 bytes"):
        Encryption.from_file(key_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_key_that_others_may_open_is_refused(tmp_path, mode):
    path = key_file(tmp_path, KEY)
    path.chmod(mode)
    with pytest.raises(SettingsError, match="open to other users"):
        Encryption.from_file(path)


def test_a_key_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        Encryption.from_file(tmp_path / "key")
    with pytest.raises(SettingsError, match="cannot be read"):
        Encryption.from_file(tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingDependencyError, match=r"\[encryption\]"):
        Encryption.from_file(key_file(tmp_path, KEY))


def key_file(folder, content):
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    return path
