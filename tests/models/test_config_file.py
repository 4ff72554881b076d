"""Reading config.json: whatever is on disk gives an object or one clear error."""

import json
import os

import pytest

from ridgeline.core.errors import CorruptFileError, ModelNotFoundError
from ridgeline.models import parse_config, read_config
from ridgeline.models.config import MAX_CONFIG_BYTES


def test_folder_or_file(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == {"a": 1}


def test_missing(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "no", tmp_path / "file" / "below"):
        with pytest.raises(ModelNotFoundError, match="no file"):
            read_config(path)


def test_not_a_plain_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")  # would block for ever
    with pytest.raises(ModelNotFoundError, match="not a file"):
        read_config(tmp_path)


def test_too_large(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(CorruptFileError, match="bytes"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"a": \xff}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": 1} trailing',
    ],
    ids=lambda data: f"{data[:12]!r}x{len(data)}",
)
def test_not_a_json_object(data):
    with pytest.raises(CorruptFileError):
        parse_config(data)


def test_byte_order_marks_are_read():
    assert parse_config(json.dumps({"a": "é"}).encode("utf-8-sig")) == {"a": "é"}
