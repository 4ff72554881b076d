"""Every level that this machine runs, through the C API, by the program in csrc/tests.

`make test-emulated` runs the same program on emulated processors for the levels that it does not.
"""

import subprocess

import pytest
from tests.kernels.cpu import levels
from tests.kernels.cpu.native import LEVELS

from ridgeline.kernels.cpu.library import LEVEL_VARIABLE, chosen_level


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return levels.build(tmp_path_factory.mktemp("levels"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_agrees_with_the_others(program, level):
    command = [program, levels.library_folder(), level]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"levels that run here: {' '.join(LEVELS)}\n" in run.stdout


def test_the_program_names_the_level_that_the_package_chooses(program, monkeypatch):
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    command = [program, levels.library_folder(), "generic"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert f"level that is chosen: {chosen_level()}\n" in run.stdout
