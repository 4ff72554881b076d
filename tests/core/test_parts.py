"""Parts of other packages: the example's, and ones that are broken, found by their entry points."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.tiny import CONFIG

from ridgeline import LLM, SamplingParams
from ridgeline.core import parts
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.executors import executor_traits
from ridgeline.models import describe, model_types
from ridgeline.quant import quant_methods, read_scheme

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


def install(folder, name, points):
    """What an installed package leaves in site-packages, and its modules in ``folder``."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the path, where the example is installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(tmp_path, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path))
    parts._found.cache_clear()
    yield tmp_path
    parts._found.cache_clear()


def test_an_installed_drafter_is_used_and_changes_no_output(packages):
    params = SamplingParams(temperature=0, max_tokens=32)
    prompt = "def add(a, b):\n    return a + b\n\ndef add(a, b):"
    with LLM() as llm:
        (plain,) = llm.generate(prompt, params)
    with LLM(speculation="bigram") as llm:
        (drafted,) = llm.generate(prompt, params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert sum(drafted.outputs[0].num_drafted) > 0


def test_an_installed_policy_orders_the_queue(packages):
    with LLM(scheduling_policy="shortest-first", max_num_seqs=1) as llm:
        long, short = llm.generate(
            ["import os", "import os"],
            [SamplingParams(max_tokens=24, seed=1), SamplingParams(max_tokens=2, seed=1)],
        )
    assert short.timings.end_to_end_s < long.timings.end_to_end_s


def test_other_processes_find_them_and_say_so(packages):
    path = os.pathsep.join([str(packages), str(EXAMPLE)])
    found = subprocess.run(
        [sys.executable, "-m", "ridgeline", "collect-env", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    listed = json.loads(found.stdout)["parts"]
    assert listed["drafters/bigram"] == (
        "bigram_drafter:BigramDrafter of ridgeline-plugin-example 1.0"
    )


def test_families_schemes_and_executors_of_others(packages, monkeypatch):
    (packages / "own_parts.py").write_text(
        "from dataclasses import replace\n"
        "from ridgeline.executors.cpu.traits import TRAITS\n"
        "from ridgeline.models.llama import FAMILY\n"
        "from ridgeline.quant.gptq import GPTQ\n"
        "family = replace(FAMILY, model_type='own_llama')\n"
        "executor = replace(TRAITS, name='own')\n"
        "scheme = GPTQ.read\n"
    )
    groups = {"model_families": "own_llama", "executors": "own", "quantization_schemes": "own"}
    values = {"model_families": "family", "executors": "executor", "quantization_schemes": "scheme"}
    points = {f"ridgeline.{kind}": {groups[kind]: f"own_parts:{values[kind]}"} for kind in groups}
    install(packages, "own", points)
    parts._found.cache_clear()
    assert "own_llama" in model_types()
    assert describe(CONFIG | {"model_type": "own_llama"}).spec == describe(CONFIG).spec
    assert executor_traits("own").name == "own"
    assert "own" in quant_methods()
    with pytest.raises(Exception, match="bits"):
        read_scheme({"quant_method": "own"})


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({"bad": "no_such_module:Drafter"}, "of broken 1.0, cannot be loaded: ModuleNotFoundError"),
        ({"bigram": "another:Drafter"}, "is brought by several packages: broken 1.0, ridgeline-"),
    ],
)
def test_broken_parts_are_one_sentence(packages, points, said):
    install(packages, "broken", {"ridgeline.drafters": points})
    parts._found.cache_clear()
    (name,) = points
    with pytest.raises(SettingsError, match=said):
        LLM(speculation=name)


def test_an_unknown_name_lists_installed_ones(packages):
    with pytest.raises(SettingsError, match=r"speculation must be one of off, .*, bigram\."):
        EngineConfig(speculation="nothing")
