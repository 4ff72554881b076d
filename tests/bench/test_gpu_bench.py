"""The GPU benchmark, in miniature on the CPU, so that it runs at its first use on a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline.bench.gpu.__main__ import main
from ridgeline.bench.gpu.ceilings import datasheet
from ridgeline.bench.gpu.processes import Job, Part, _Run, _work, conduct
from ridgeline.bench.gpu.progress import Message
from ridgeline.bench.gpu.settings import MINIATURE
from ridgeline.kernels.gpu import missing_for_gpu
from ridgeline.roofline.fitting import of_new_format

# Refuses every import but those that a GPU machine without our other dependencies has: as a
# sitecustomize, since parts are measured in processes of their own.
ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ImportError(f"{{name}} is not there")

sys.meta_path.insert(0, Refuse())
"""
SOURCES = Path(__file__).parents[2] / "src"
REFUSED = {
    "huggingface_hub", "jinja2", "llguidance", "msgspec", "prometheus_client", "psutil", "zmq",
    "rich", "safetensors", "starlette", "tokenizers", "transformers", "uvicorn",
}  # fmt: skip


def test_everything_is_measured_with_nothing_but_torch_triton_and_numpy(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ALONE.format(refused=REFUSED))
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline.bench.gpu", "--host", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{SOURCES}"},
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
    assert {each["sampled"] for each in report["steps"]} == {False, True}
    rungs = [each["rung"] for each in report["ladder"] if each["shape"] == "tiny"]
    assert rungs[0] == "PyTorch, op by op"
    assert rungs[-1] == "batch of 8"
    assert any("attention" in each["name"] for each in report["kernels"])
    assert set(report["ceilings"]["measured"]) == {"read", "copy", "add", "matmul bfloat16"}
    phases = {"decode", "prefill"}
    of_new_formats = {of_new_format(each) for each in phases}
    assert set(report["predictions"]["median_errors"]) == phases | of_new_formats
    for text in ("gate·up int4", "decode 1 at 32", "a graph for the step"):
        assert text in done.stdout


def test_tests_of_kernels_need_nothing_more_than_pytest(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ALONE.format(refused=REFUSED | {"hypothesis"}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "tests/kernels/triton"],
        cwd=SOURCES.parent,
        env=os.environ
        | {"PYTHONPATH": f"{tmp_path}:{SOURCES}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def breaks(bench):
    for case in ("first", "refused", "fatal", "last"):
        if bench.progress.allows(case):
            if case == "refused":
                raise ValueError("not here")
            if case == "fatal":
                os._exit(3)
            bench.progress.result("rate", (case, 1.0))


def cannot_begin(bench):
    raise OSError("nothing there")


def test_what_fails_costs_a_single_case():
    messages = []
    job = Job(
        parts=(Part("broken", breaks), Part("absent", cannot_begin), Part("again", breaks)),
        settings=MINIATURE,
        on_host=True,
        ends_at=time.time() + 600,
        stops_at=time.time() + 600,
        patience_s=600,
        done=frozenset({"late"}),
    )
    conduct(job, messages.append)
    told = [(kind, what) for kind, what, _ in messages if kind not in ("began", "device")]
    assert told == [
        ("rate", "first"), ("failed", "refused"), ("failed", "fatal"), ("rate", "last"),
        ("finished", "broken"), ("failed", "absent"), ("finished", "absent"),
        ("finished", "again"),
    ]  # fmt: skip
    problems = [value for kind, _, value in messages if kind == "failed"]
    assert problems[0].startswith("ValueError: not here")
    assert problems[1] == "its process ended"
    assert problems[2].startswith("OSError: nothing there")


def test_no_case_begins_when_the_time_is_over():
    messages = []
    now = time.time()
    job = Job(
        parts=(Part("late", breaks),), settings=MINIATURE, on_host=True, ends_at=now,
        stops_at=now, patience_s=1,
    )  # fmt: skip
    conduct(job, messages.append)
    assert messages == [Message("left out", "late", "no time left")]


class Silent:
    """A connection over which no more than ``messages`` come."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def poll(self, timeout_s):
        return bool(self.messages)

    def recv(self):
        return self.messages.pop(0)


@pytest.mark.parametrize(("left_s", "kind"), [(5, "left out"), (600, "failed")])
def test_what_the_end_of_the_time_stops_is_left_out_and_what_hangs_failed(left_s, kind):
    told = []
    now = time.time()
    job = Job(
        parts=(Part("long", breaks), Part("next", breaks)), settings=MINIATURE, on_host=True,
        ends_at=now, stops_at=now + left_s, patience_s=60,
    )  # fmt: skip
    run = _Run(job, told.append)
    problem = run._receive(Silent(Message("began", "slow")))
    outcome = run._outcome(problem)
    assert outcome[:2] == (kind, "slow")
    assert run.is_late == (kind == "left out")
    if run.is_late:
        assert outcome.value == "stopped as the time was over, with what was behind it in long"
    else:
        assert outcome.value == "it was stopped after 60 s"


def test_no_part_begins_in_a_process_whose_time_is_over():
    class Told(list):
        send = list.append

    told = Told()
    job = Job(
        parts=(Part("absent", cannot_begin), Part("broken", breaks)), settings=MINIATURE,
        on_host=True, ends_at=time.time(), stops_at=time.time() + 60, patience_s=60,
    )  # fmt: skip
    _work(job, told)
    assert [each[:2] for each in told[1:]] == [
        ("left out", "absent"), ("finished", "absent"),
        ("left out", "broken"), ("finished", "broken"),
    ]  # fmt: skip


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
