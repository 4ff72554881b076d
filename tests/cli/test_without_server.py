"""Planning and generating need no web server; what does says which extra has it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ridgeline.cli.main import _SERVER_PACKAGES

WITHOUT_SERVER = f"""
import sys
sys.modules.update(dict.fromkeys({_SERVER_PACKAGES!r}))
from ridgeline.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(line):
    command = [sys.executable, "-c", WITHOUT_SERVER, *line.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_planning_needs_none():
    done = run("plan --shape llama-3.1-8b --hardware l4 --rate 0.5 --slo ttft=0.5,tpot=0.1")
    assert done.returncode == 0, done.stderr
    assert run("serve --help").returncode == 0


@pytest.mark.parametrize("line", ["serve", "batch lines.jsonl -o answers.jsonl"])
def test_a_server_names_its_extra(line):
    done = run(line)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith("[server]'.\n")
    assert done.stderr.count("\n") == 1


def test_the_extra_has_what_the_command_line_asks_for():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extra = " ".join(project["optional-dependencies"]["server"])
    assert all(name.replace("_", "-") in extra for name in _SERVER_PACKAGES)
    assert not any(name in " ".join(project["dependencies"]) for name in ("starlette", "uvicorn"))
