"""A file that cannot be written leaves nothing behind; one that is written is on the disk."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ridgeline.core.errors import DiskError
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.weights.gguf.writer import GGUFTensor, GGUFWriter
from ridgeline.weights.safetensors_writer import SafetensorsTensor, SafetensorsWriter
from ridgeline.weights.temporary import NewFile, copy_durably, temporary_name, write_durably


def test_a_file_without_room_is_removed(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="new"):
        NewFile(tmp_path / "new", 1 << 62)
    assert not list(tmp_path.iterdir())


def test_what_is_finished_is_not_closed_once_more(tmp_path: Path) -> None:
    """By then its number may be that of another file."""
    new = NewFile(tmp_path / "new", 1)
    new.finish()
    with (tmp_path / "other").open("wb", buffering=0) as other:
        new.discard()
        assert other.write(b"x") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_a_killed_process_has_left_goes_with_the_next(tmp_path: Path) -> None:
    """Once a conversion that was killed left its gigabytes under a hidden name for good."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".x.gguf.{gone.pid}").write_text("left")
    (tmp_path / f".x.gguf.{10**12}").mkdir()
    kept = [f".x.gguf.{os.getppid()}", ".x.gguf.1a", f".y.gguf.{gone.pid}", f"x.gguf.{gone.pid}"]
    for name in kept:
        (tmp_path / name).write_text("not ours")
    assert temporary_name(tmp_path / "x.gguf").name == f".x.gguf.{os.getpid()}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.fixture
def small_files():
    """No file may be over 1,000 bytes, which is told as a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_whose_index_has_no_room_is_removed(tmp_path: Path, small_files: None) -> None:
    tensors = [SafetensorsTensor(name=f"tensor {i}", dtype="F32", shape=(4,)) for i in range(40)]
    with pytest.raises(DiskError, match="index"):
        SafetensorsWriter(tmp_path / "new", tensors, shard_bytes=16)
    assert not list(tmp_path.iterdir())


def test_files_of_a_split_that_are_not_all_published_are_removed(tmp_path: Path) -> None:
    form = next(form for form in GGUF_FORMATS.values() if form.name == "F32")
    tensors = [GGUFTensor(name=name, format=form, shape=(1,)) for name in "ab"]
    writer = GGUFWriter(tmp_path / "x.gguf", {}, tensors, split_max_bytes=4)
    for name in "ab":
        writer.write(name, 0, np.zeros((1, 4), np.uint8))
    (tmp_path / "x-00002-of-00002.gguf").mkdir()
    with pytest.raises(DiskError), writer:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x-00002-of-00002.gguf"]


def test_a_source_that_fails_halfway_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def blocks():
        yield b"new"
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        write_durably(tmp_path / "file", blocks())
    with pytest.raises(DiskError, match="could not be read"):
        copy_durably(tmp_path / "none", tmp_path / "file")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_every_file_of_a_converted_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.weights.gguf_export import write_checkpoint
    from tests.weights.test_conversion import LLAMA

    from ridgeline.weights.conversion import convert_to_safetensors

    write_checkpoint(LLAMA, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    synced, named, plain = set(), set(), os.fsync

    def fsync(descriptor: int) -> None:
        is_named = (tmp_path / "out").exists()
        (named if is_named else synced).add(os.fstat(descriptor).st_ino)
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    convert_to_safetensors(tmp_path / "model", tmp_path / "out", "bfloat16")
    files = [tmp_path / "out", *(tmp_path / "out").iterdir()]
    assert len(files) > 3
    assert [path.name for path in files if path.stat().st_ino not in synced] == []
    assert named == {tmp_path.stat().st_ino}  # and then the name
