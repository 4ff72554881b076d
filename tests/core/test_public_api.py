"""Every package's `__all__` is true and complete, and torch is loaded only when it is needed."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import ridgeline
from ridgeline.cli.main import COMMANDS

PACKAGES = sorted(
    name
    for _, name, is_package in pkgutil.walk_packages(ridgeline.__path__, "ridgeline.")
    if is_package
)

FIRST_THAT_IMPORTS_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(name)
"""


@pytest.mark.parametrize("name", ["ridgeline", *PACKAGES])
def test_all_names_exist_and_are_sorted(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(exported) == len(set(exported))
    for attribute in exported:
        assert getattr(module, attribute) is not None


def test_torch_is_not_imported_by_what_describes_nor_by_commands():
    """It takes a second, and ``--help`` of no command needs it."""
    names = [
        *("ridgeline", "ridgeline.core.plan", "ridgeline.text", "ridgeline.engine.loop"),
        *sorted({f"ridgeline.cli.{module.partition(':')[0]}" for module, _ in COMMANDS.values()}),
    ]
    run = subprocess.run(
        [sys.executable, "-c", FIRST_THAT_IMPORTS_TORCH, *names], capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
