"""What an executor is, is said once, in its folder, and read without torch."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.cli.test_plan import model_options
from tests.fakes import FakeExecutor
from tests.tiny import tiny_model

import ridgeline
from ridgeline.cli.priced_model import read_model
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import ON_LOAD
from ridgeline.core.plan import ModelRole
from ridgeline.executors import create_executor, default_executor, executor_names, registry
from ridgeline.executors.traits import ExecutorTraits
from ridgeline.roofline.calibration import typical
from ridgeline.roofline.catalogue import load_catalogue

SOURCE = Path(ridgeline.__file__).parent
MODELS = {ModelRole.TARGET: tiny_model()}


@pytest.fixture
def toy(monkeypatch):
    """An executor of its own, whose models are whatever it is given."""
    traits = ExecutorTraits(
        name="toy",
        create=lambda _models, options: FakeExecutor(block_tokens=options.block_tokens),
        block_multiple=4,
        weight_formats=("int8",),
    )
    monkeypatch.setitem(registry._TRAITS, "toy", traits)


def test_traits_are_read_without_torch():
    code = (
        "import sys; from ridgeline.executors import registry;"
        "print(*(traits.calibrated_formats for traits in registry._TRAITS.values()));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_formats_are_those_of_the_settings():
    for name in executor_names():
        assert set(registry.executor_traits(name).weight_formats) <= set(ON_LOAD)


def test_an_executor_is_asked_by_name_in_its_folder_alone():
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if not path.is_relative_to(SOURCE / "executors") or path.name == "priced.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and _compares_names(node)
    ]
    assert found == []


def _compares_names(node):
    if ast.unparse(node.left).endswith("type"):
        return False  # a torch device's
    constants = [
        each.value
        for side in (node.left, *node.comparators)
        for each in (side.elts if isinstance(side, ast.Tuple) else (side,))
        if isinstance(each, ast.Constant)
    ]
    is_equality = isinstance(node.ops[0], ast.Eq | ast.NotEq)
    return any(name in constants for name in executor_names()) and (
        is_equality or isinstance(node.comparators[0], ast.Tuple)
    )


def test_another_executor_is_chosen_refused_and_made_by_its_traits(toy):
    assert "toy" in executor_names()
    assert default_executor(block_tokens=4) == "toy"
    assert default_executor(block_tokens=6) == "reference"
    assert create_executor(MODELS, EngineConfig(executor="toy", block_tokens=8)).block_tokens == 8
    with pytest.raises(SettingsError, match="toy executor does not store KV in int8: it keeps"):
        create_executor(MODELS, EngineConfig(executor="toy", block_tokens=4, kv_cache_dtype="int8"))
    with pytest.raises(SettingsError, match="of the cuda executor, and this is toy"):
        create_executor(
            MODELS, EngineConfig(executor="toy", block_tokens=4, attention_backend="triton")
        )


def test_the_reference_executor_is_priced_with_expanded_weights():
    """It has no products of codes: those of a checkpoint are expanded as it is loaded."""
    ceilings = load_catalogue().device("h100").ceilings()
    measured = typical(replace(ceilings, measured=True))
    ours = msgspec.structs.replace(measured, executor="reference")
    priced = read_model(model_options(None, shape="gpt-oss-20b"), ours).priced
    assert priced.main_format == priced.activations
