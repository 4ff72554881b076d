"""Kernels that do not belong to this package: one sentence, and no traceback."""

import shutil

import pytest
from tests.kernels.cpu import levels

from ridgeline.cli.main import main
from ridgeline.kernels.cpu import library, pool

STALE = "The CPU kernels are of another version; install Ridgeline again."


@pytest.fixture(params=["detect", "kernels", "bytes"])
def said_of_it(request, tmp_path, monkeypatch):
    """Kernels that lack functions, or that are no library, and what is said of them."""
    found = levels.library_folder()
    for path in found.glob("libridgeline_cpu_*.so"):
        shutil.copyfile(path, tmp_path / path.name)
    chosen = library.chosen_level()
    another = found / f"libridgeline_cpu_{'detect' if request.param == 'kernels' else chosen}.so"
    replaced = tmp_path / f"libridgeline_cpu_{'detect' if request.param == 'detect' else chosen}.so"
    if request.param == "bytes":
        replaced.write_bytes(b"\x7fELF of another machine")
    else:
        shutil.copyfile(another, replaced)
    monkeypatch.setattr(library, "_find", lambda level: tmp_path / f"libridgeline_cpu_{level}.so")
    monkeypatch.setattr(pool, "_shared", {})  # those of earlier tests have loaded theirs
    library.load_library.cache_clear()
    yield "The CPU kernels cannot be loaded" if request.param == "bytes" else STALE
    library.load_library.cache_clear()


@pytest.mark.parametrize("command", ["generate -p x -n 1", "ceilings", "bench embedded"])
def test_kernels_of_another_version_end_a_command_with_a_sentence(command, said_of_it, capsys):
    assert main(command.split()) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"error: {said_of_it}" in shown
    assert "Traceback" not in shown
