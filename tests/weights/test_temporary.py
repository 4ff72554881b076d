"""A file that cannot be written leaves nothing behind."""

from pathlib import Path

import pytest

from ridgeline.core.errors import DiskError
from ridgeline.weights.temporary import NewFile


def test_a_file_without_room_is_removed(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="new"):
        NewFile(tmp_path / "new", 1 << 62)
    assert not list(tmp_path.iterdir())
