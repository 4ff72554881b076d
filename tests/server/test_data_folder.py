"""Where a server's files and batches lie, and that no two servers lie there."""

import socket
import sqlite3
import threading
from contextlib import closing

import pytest

from ridgeline.cli import main
from ridgeline.core.errors import DiskError
from ridgeline.server.jobs.database import NAME, Database
from ridgeline.server.jobs.folder import default_folder


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def fill(folder):
    """What an earlier version left, in a write-ahead log that was never checkpointed, too."""
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "file-1").write_bytes(b"lines")
    source = folder.parent / "source"
    with closing(Database(source)) as database:
        database.run_blocking(
            lambda db: db.execute("INSERT INTO files VALUES ('file-1', 't', 'n', 'batch', 5, 1)")
        )
        for path in source.glob(f"{NAME}*"):
            (folder / path.name).write_bytes(path.read_bytes())
    assert (folder / f"{NAME}-wal").stat().st_size > 0


def held(folder):
    with closing(sqlite3.connect(folder / NAME)) as connection:
        rows = connection.execute("SELECT id FROM files").fetchall()
    return rows, (folder / "files" / "file-1").read_bytes()


def test_servers_with_defaults_do_not_collide(base):
    with closing(Database(default_folder(8000))), closing(Database(default_folder(8001))):
        assert sorted(path.name for path in base.iterdir()) == ["ridgeline-8000", "ridgeline-8001"]


def test_the_folder_of_an_earlier_version_is_taken_over_whole_and_once(base, caplog):
    fill(base / "ridgeline")
    assert default_folder(9000) == base / "ridgeline-9000"
    assert not (base / "ridgeline").exists()
    assert held(base / "ridgeline-9000") == ([("file-1",)], b"lines")
    assert "has become" in caplog.text
    assert default_folder(9000) == base / "ridgeline-9000"
    assert default_folder(8000) == base / "ridgeline-8000"
    assert held(base / "ridgeline-9000") == ([("file-1",)], b"lines")


def test_of_servers_that_start_at_once_one_takes_it_over(base):
    fill(base / "ridgeline")
    ready, found = threading.Barrier(8), []

    def start(port):
        ready.wait()
        found.append(default_folder(port))

    threads = [threading.Thread(target=start, args=(port,)) for port in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8
    assert [held(folder) for folder in found if folder.exists()] == [([("file-1",)], b"lines")]


def test_a_folder_in_use_or_beside_another_stays_where_it_is(base, caplog):
    fill(base / "ridgeline")
    with closing(Database(base / "ridgeline")):
        assert default_folder(8000) == base / "ridgeline-8000"
    Database(base / "ridgeline-8000").close()
    assert default_folder(8000) == base / "ridgeline-8000"
    assert held(base / "ridgeline") == ([("file-1",)], b"lines")
    assert caplog.text.count("are not served; --data-dir") == 2


def test_a_folder_that_cannot_be_moved_is_one_sentence_and_stays(base):
    fill(base / "ridgeline")
    (base / "ridgeline-8000").mkdir()
    (base / "ridgeline-8000" / "notes.txt").write_text("mine")
    with pytest.raises(DiskError, match="Use it with --data-dir"):
        default_folder(8000)
    assert held(base / "ridgeline") == ([("file-1",)], b"lines")


def test_a_data_folder_in_use_is_said_before_a_model_is_looked_for(tmp_path, capsys):
    with closing(Database(tmp_path)):
        words = ["serve", "./no-such-model", "--port", "0", "--data-dir", str(tmp_path)]
        assert main(words) != 0
    error = capsys.readouterr().err
    assert f"Another server uses the data folder {tmp_path}" in error
    assert "no-such-model" not in error
    # What ends before it serves leaves the folder to others.
    assert main(words) != 0
    assert "no-such-model" in capsys.readouterr().err
    Database(tmp_path).close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_start_that_is_refused_leaves_no_folder_behind(base, capsys, caplog, count):
    options = ["--port", "0", "--max-model-len", "99999999", "-dp", str(count)]
    assert main(["serve", "embedded", *options]) == 2
    assert "beyond the model's" in capsys.readouterr().err
    assert list(base.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_before_a_model_is_looked_for(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "data"
    words = ["serve", "./no-such-model", "--port", "0", "--data-dir", str(folder)]
    assert main(words) == 1
    assert f"{tmp_path / 'file'} cannot be written" in capsys.readouterr().err


def test_files_that_are_no_such_are_said_before_a_model_is_looked_for(base, tmp_path, capsys):
    (tmp_path / "bytes").write_bytes(bytes(range(200)))
    (tmp_path / "bytes").chmod(0o600)
    for option, path, said in (
        ("--guard-list", "none", "cannot be read: No such file or directory."),
        ("--guard-list", "bytes", "is not text in UTF-8."),
        ("--router-key-file", "bytes", "must hold 32 bytes"),
    ):
        words = ["serve", "./no-such-model", "--port", "0", option, str(tmp_path / path)]
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert [each.name for each in base.iterdir()] == ["bytes"]


def test_a_folder_is_made_for_its_owner_with_those_above_it(tmp_path):
    Database(tmp_path / "a" / "b").close()
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "a", tmp_path / "a" / "b")} == {
        0o700
    }


def test_a_port_in_use_is_said_before_a_model_is_looked_for(base, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "./no-such-model", "--port", port]) != 0
    error = capsys.readouterr().err
    assert f"Port {port} of 127.0.0.1 cannot be used" in error
    assert "no-such-model" not in error
    assert not list(base.iterdir())
