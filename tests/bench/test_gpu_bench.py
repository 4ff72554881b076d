"""The GPU benchmark, in miniature on the CPU, so that it runs at its first use on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.bench.gpu.__main__ import main
from ridgeline.bench.gpu.ceilings import datasheet
from ridgeline.kernels.gpu import missing_for_gpu

# Refuses every import but those that a GPU machine without our other dependencies has.
ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ImportError(f"{{name}} is not there")

sys.meta_path.insert(0, Refuse())
from ridgeline.bench.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
REFUSED = {
    "huggingface_hub", "jinja2", "llguidance", "msgspec", "prometheus_client", "psutil", "zmq",
    "rich", "safetensors", "starlette", "tokenizers", "transformers", "uvicorn",
}  # fmt: skip


def test_everything_is_measured_with_nothing_but_torch_triton_and_numpy(tmp_path):
    code = ALONE.format(refused=REFUSED)
    done = subprocess.run(
        [sys.executable, "-c", code, "--host", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu-*-host.json")
    report = json.loads(path.read_text())
    assert report["machine"] == "host"
    assert report["failed"] == report["left_out"] == []
    assert {each["format"] for each in report["steps"]} == {"bfloat16", "int4", "fp8"}
    assert {each["phase"] for each in report["steps"]} == {"decode", "prefill"}
    assert all(each["seconds"] > 0 and each["moved_bytes"] > 0 for each in report["steps"])
    rungs = [each["rung"] for each in report["ladder"] if each["shape"] == "tiny"]
    assert rungs[0] == "PyTorch, op by op"
    assert rungs[-1] == "batch of 8"
    assert any("attention" in each["name"] for each in report["kernels"])
    assert set(report["predictions"]["median_errors"]) == {"decode", "prefill"}
    for text in ("gate·up int4", "decode 1 at 32", "a graph for the step"):
        assert text in done.stdout


@pytest.mark.skipif(missing_for_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 1
    assert "No GPU can be measured here" in capsys.readouterr().err
    assert main(["--check"]) == 0
    assert "skipped: " in capsys.readouterr().out


def test_datasheets_are_found_by_the_drivers_names():
    h200, missing = datasheet("NVIDIA H200"), datasheet("Some Other Device")
    assert h200 is not None
    assert h200.memory.bytes_per_s == 4.8e12
    assert h200.flops_per_s["bfloat16"] == 989e12
    assert missing is None


def test_it_needs_no_build():
    """The command of the Makefile runs on the sources alone."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "PYTHONPATH=src $(PYTHON) -m ridgeline.bench.gpu" in makefile
