"""What commands import: nothing heavy without something to do."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "rich", "jinja2", "yaml", "tokenizers", "huggingface_hub", "uvicorn")


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("generat",)])
def test_help_and_typos_import_nothing_heavy(words):
    code = (
        "import atexit, sys; from ridgeline.cli import main;"
        f"atexit.register(lambda: print('IMPORTED', *(set({HEAVY}) & sys.modules.keys())));"
        f"sys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.rpartition("IMPORTED")[2].split() == []


def test_jinja2_is_left_to_the_process_that_renders():
    code = "import sys, ridgeline.engine.llm; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
