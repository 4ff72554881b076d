"""Texts of `embed` and `rerank`, one a line."""

import pytest

from ridgeline.cli.text_lines import read_texts
from ridgeline.core.errors import InvalidRequestError


def test_a_line_ends_where_it_ends_and_nowhere_else(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(
        '\ufeff{"text": "a\u2028b\x0bc"}\r\n\n"d\u0085e"\n'.encode().replace(b"\x0b", b" ")
    )
    assert read_texts(path) == ["a\u2028b c", "d\u0085e"]


def test_prose_is_told_from_json_by_the_name_of_the_file(tmp_path):
    (tmp_path / "texts.txt").write_text('{"text": "a"}\n{ b\n')
    assert read_texts(tmp_path / "texts.txt") == ["a", "{ b"]
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    with pytest.raises(InvalidRequestError, match="Line 2 is not"):
        read_texts(tmp_path / "texts.jsonl")
