"""Headers that contradict themselves are refused, and those at the edge are read."""

from contextlib import nullcontext
from io import BytesIO

import pytest
from tests.weights import fuzz_cases, test_gguf_fuzz

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.weights.gguf import header as gguf
from ridgeline.weights.safetensors_header import read_header

SMALL = 20_000  # bytes
RIGHT = {
    "dtype-f8", "dtype-unknown", "header-empty-object", "header-trailing-spaces", "metadata-fine",
    "name-empty", "name-newline-escape", "name-nul", "scalar", "zero-size",
}  # fmt: skip
RIGHT_GGUF = {"nothing", "tensor-format-not-read"}  # which is refused when it is wanted
UNSUPPORTED_GGUF = {
    "big-endian",
    "tensor-format-unknown",
    "tensor-format-given-up",
    "version-1",
    "version-4",
}


def outcomes(read, files):
    """Which files are read, and which are refused with each error."""
    found = {None: set(), CorruptFileError: set(), UnsupportedModelError: set()}
    for name, content in files.items():
        if len(content) <= SMALL:
            try:
                read(BytesIO(content), len(content), "the file")
                found[None].add(name)
            except (CorruptFileError, UnsupportedModelError) as error:
                found[type(error)].add(name)
    return found


def test_safetensors_that_contradict_themselves_are_refused():
    found = outcomes(read_header, fuzz_cases.crafted_files())
    assert found[None] == RIGHT
    assert not found[UnsupportedModelError]


def test_a_header_begins_with_its_object():
    """By the format's specification; JSON allows a space before it."""
    text = b' {"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    for header, is_right in ((text, False), (text[1:] + b" ", True)):
        data = len(header).to_bytes(8, "little") + header + b"\0"
        with nullcontext() if is_right else pytest.raises(CorruptFileError, match="JSON object"):
            assert list(read_header(BytesIO(data), len(data), "the file")) == ["a"]


def test_a_big_endian_file_is_told_from_one_of_another_version():
    files = test_gguf_fuzz.crafted()
    for name, told in (("big-endian", "is a big-endian"), ("version-1", "is GGUF version 1,")):
        with pytest.raises(UnsupportedModelError, match=told):
            gguf.read_header(BytesIO(files[name]), len(files[name]), "the file")


def test_gguf_that_contradicts_itself_is_refused():
    found = outcomes(gguf.read_header, test_gguf_fuzz.crafted())
    assert found[None] == RIGHT_GGUF
    assert found[UnsupportedModelError] == UNSUPPORTED_GGUF
