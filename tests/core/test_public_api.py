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


@pytest.mark.parametrize("name", ["ridgeline", *PACKAGES])
def test_all_names_exist_and_are_sorted(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(exported) == len(set(exported))
    for attribute in exported:
        assert getattr(module, attribute) is not None


@pytest.mark.parametrize(
    "name",
    [
        *("ridgeline", "ridgeline.core.plan", "ridgeline.text", "ridgeline.engine.loop"),
        *sorted({f"ridgeline.cli.{module.partition(':')[0]}" for module, _ in COMMANDS.values()}),
    ],
)
def test_torch_is_not_imported_by(name):
    """It takes a second, and ``--help`` of no command needs it."""
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
