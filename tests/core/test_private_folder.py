import os
import subprocess
import sys
import tempfile

import pytest

from ridgeline.core.private_folder import PrivateFolder

HOLD = """
from ridgeline.core.private_folder import PrivateFolder
held = PrivateFolder()
(held.path / "key").write_text("secret")
print(held.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_its_makers_alone_and_goes_with_what_is_in_it(base):
    with PrivateFolder() as folder:
        (folder / "key").write_text("secret")
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(base.iterdir())


def test_what_a_killed_process_left_goes_as_the_next_begins_and_what_is_held_stays(base):
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        left = process.stdout.readline().decode().strip()
        with PrivateFolder():
            assert os.path.exists(f"{left}/key")
        process.kill()
        process.wait()
        assert os.path.exists(f"{left}/key")
    with PrivateFolder() as folder:
        assert list(base.iterdir()) == [folder]


def test_one_that_another_start_takes_for_abandoned_is_made_again(base, monkeypatch):
    opened = os.open

    def late(path, flags):
        monkeypatch.setattr(os, "open", opened)
        os.rmdir(path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", late)
    with PrivateFolder() as folder:
        assert list(base.iterdir()) == [folder]


def test_folders_that_are_none_of_ours_stay(base):
    for name, mode in (("ridgeline-run-open", 0o755), ("ridgeline-mine", 0o700)):
        (base / name).mkdir()
        (base / name).chmod(mode)
    (base / "elsewhere").mkdir(mode=0o700)
    (base / "ridgeline-run-link").symlink_to(base / "elsewhere")
    before = sorted(base.iterdir())
    PrivateFolder().remove()
    assert sorted(base.iterdir()) == before
