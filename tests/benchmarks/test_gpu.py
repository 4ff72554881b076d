"""The GPU benchmark, in miniature on the CPU, so that it runs at its first use on a GPU."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu import peers, steps
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.ceilings import datasheet
from benchmarks.gpu.kernels import _Timer, bench_kernels
from benchmarks.gpu.ladder import climb
from benchmarks.gpu.processes import Job, Part, _Run, _work, conduct
from benchmarks.gpu.progress import Bench, Message, Progress
from benchmarks.gpu.report import Report
from benchmarks.gpu.run import parts
from benchmarks.gpu.settings import FULL, MINIATURE
from benchmarks.gpu.steps import _Decode, bench_steps
from benchmarks.gpu.timing import measure
from benchmarks.gpu.tuned import TunedProduct, bench_tuning
from tests.executors.flash_standin import Package

from ridgeline.core.plan import step_in_flight
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.torch_kernels import TorchKernels
from ridgeline.executors.cuda.tuning import Tuning
from ridgeline.executors.cuda.tuning_cache import Tuned, TuningCache
from ridgeline.kernels.gpu import missing_for_gpu
from ridgeline.kernels.triton import LinearConfig, LinearKey
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
ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT / 'src'}:{ROOT}"
REFUSED = {
    "huggingface_hub", "jinja2", "llguidance", "ml_dtypes", "msgspec", "prometheus_client",
    "psutil", "rich", "safetensors", "starlette", "tokenizers", "transformers", "uvicorn", "zmq",
}  # fmt: skip


def test_everything_is_measured_with_nothing_but_torch_triton_and_numpy(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ALONE.format(refused=REFUSED))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--host", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{PATHS}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels of tiny" not in done.stdout, "what is compiled ahead is told where it fails"
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
    for text in (
        "gate·up int4", "decode 1 at 32", "a graph for the step", "KV int8", "KV float8",
        "rotation and KV write", "draws by top-p, 3 rows", "experts int4",
    ):  # fmt: skip
        assert text in done.stdout


def test_tests_of_kernels_need_nothing_more_than_pytest(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ALONE.format(refused=REFUSED | {"hypothesis"}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "tests/kernels/triton"],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": f"{tmp_path}:{PATHS}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "RIDGELINE_TEST_FOLDERS": "",
        },
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
    assert "Nothing can be measured here" in capsys.readouterr().err
    assert main(["--check"]) == 0
    assert "skipped: " in capsys.readouterr().out


def test_without_torch_it_says_so():
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu"],  # without site-packages
        env={"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "Nothing can be measured here: The GPU kernels need the package torch"
    )
    assert done.stderr.count("\n") == 1


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


class Replays(HostDevice):
    """A device on which the clock goes on by ``seconds`` for each call that a graph has."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.now_s = seconds, 0.0
        self.calls, self.spans = [], []

    def capture(self, body, pool=None):
        body()
        device, seconds = self, self.seconds * len(self.calls)

        class Graph:
            def replay(self):
                device.now_s += seconds

        return Graph()

    def record(self, *, timed=False):
        device, now_s = self, self.now_s

        class Event:
            def wait(self):
                pass

            def seconds_since(self, earlier):
                device.spans.append(now_s - earlier.now_s)
                return device.spans[-1]

        event = Event()
        event.now_s = now_s
        return event


@pytest.mark.parametrize("count", [1, 5, 40])
def test_kernels_are_timed_in_windows_of_many_calls_behind_others(count):
    device = Replays(seconds=1e-5)
    settings = replace(MINIATURE, spin_s=0.1, window_s=0.03, repeats=3)
    calls = [lambda: device.calls.append(1)] * count
    assert measure(device, calls, settings) == pytest.approx(1e-5)
    assert len(device.calls) >= 16
    *before, one, two, three = device.spans
    assert sum(before) >= 0.1
    assert min(one, two, three) >= 0.03


@pytest.mark.parametrize("ahead", [True, False])
def test_the_first_plan_of_a_batch_does_not_count(monkeypatch, ahead):
    """The first takes a minute and the others a second, each of 4 steps."""
    clock, plans = Clock(), []
    monkeypatch.setattr(steps, "time", clock)

    class Plans:
        def blocks_of(self, batch, tokens):
            return batch

        def segment(self, slot, start, tokens, *, blocks=None):
            assert start == 9
            return tokens

        def submit(self, segments, *, num_steps, admissions=(), params=None):
            seconds = 60.0 if len(plans) < 2 else 1.0
            plans.append(segments)

            def wait():
                clock.now_s += seconds
                timings = SimpleNamespace(forward_s=seconds)
                part = SimpleNamespace(token_ids=(5,) * num_steps)
                return SimpleNamespace(timings=timings, passes=[[part] * len(segments)])

            return wait

    own = _Decode(Plans(), 2, 9, replay=4, ahead=ahead, params=None)
    assert own.run(6) == (0.25, 0.25)
    assert len(plans) == 8  # one admits the batch, and one is not timed
    assert plans[-1] == ([[step_in_flight(3)], [step_in_flight(7)]] if ahead else [[5], [5]])


def test_matrices_of_a_kernel_lie_apart():
    """Or the caches of a GPU hold what is to be read from its memory."""
    seen = set()

    class Noting(TorchKernels):
        def linear(self, x_TI, matrix, **options):
            seen.add(matrix.codes.data_ptr())
            return super().linear(x_TI, matrix, **options)

    device = HostDevice()
    model = steps.random_model(device, MINIATURE.shapes["tiny"])
    for form in ("bfloat16", "int8"):
        seen.clear()
        _Timer(device, Noting(), model, replace(MINIATURE, beyond_caches_bytes=1 << 20)).product(
            form, 1
        )
        assert len(seen) == 8


def kernels_beside(package):
    told = []
    progress = Progress(told.append, done=(), ends_at=time.time() + 600)
    bench = Bench(
        device=HostDevice(), kernels=TorchKernels, settings=MINIATURE, progress=progress,
        attention=AttentionBackends(package=package),
    )  # fmt: skip
    bench_kernels(bench, "tiny")
    names = [each.value.name for each in told if each.kind == "kernel"]
    left_out = [(each.what, each.value) for each in told if each.kind == "left out"]
    return [name for name in names if name.startswith("attention")], left_out


def test_an_installed_package_has_rows_of_attention_beside_the_kernels():
    package = Package(2, page_multiple=32).functions(dtypes=(torch.bfloat16,))
    names, left_out = kernels_beside(package)
    assert left_out == []
    by = f"{package.name}, blocks of 32"
    assert [name for name in names if by in name] == [
        f"attention, 1 at 32, {by}", f"attention, 3 at 40, {by}",
        f"attention of a prompt of 24, {by}",
    ]  # fmt: skip
    assert {"attention, 1 at 32", "attention of a prompt of 24"} <= set(names)


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("FlashAttention is not installed (flash-attn).", "not installed"),
        (Package(3).functions(dtypes=(torch.float16,)), "reads float16 KV, and this is bfloat16"),
    ],
)
def test_a_package_that_cannot_attend_is_left_out_with_a_reason(package, why):
    names, ((what, told),) = kernels_beside(package)
    assert what == "kernel: attention by FlashAttention"
    assert why in told
    assert not any("blocks of" in name for name in names)


def test_what_tuning_gives_is_told():
    key = LinearKey(
        format="int4", group=32, has_zeros=False, rows=256, columns=512, tokens=16, gated=True,
        dtype="bfloat16",
    )  # fmt: skip
    found = Tuned(config=LinearConfig(64, 128, 4, 4, 3), seconds=2e-5, guess_seconds=3e-5, axes=4)
    report = Report(device="A B")
    product = TunedProduct(steps="tiny int4", product=key.name, found=found)
    report.add(Message("tuned", "tuning of tiny int4", product))
    assert "tiny int4: int4-32-symmetric-256x512-16-gated-bfloat16" in report.text()
    assert "20.0" in report.text()
    assert "1.50" in report.text()
    (entry,) = json.loads(json.dumps(report.to_json()))["tuned"]
    assert entry["gain"] == pytest.approx(1.5)
    assert entry["config"]["block_o"] == 64


def test_tuning_is_measured_first_and_known_by_what_follows(tmp_path, monkeypatch):
    """On a host nothing is timed; whoever measures steps takes what is known, and times none."""
    told, taken = [], []
    progress = Progress(told.append, done=(), ends_at=time.time() + 600)
    tuning = Tuning(cache=TuningCache(folder=tmp_path))
    bench = Bench(
        device=HostDevice(), kernels=TorchKernels, settings=MINIATURE, progress=progress,
        tuning=tuning,
    )  # fmt: skip
    monkeypatch.setattr(
        "ridgeline.executors.cuda.executor.tune", lambda *arguments: taken.append(arguments[-1])
    )
    bench_tuning(bench, "tiny", "int4")
    bench_steps(bench, "tiny", "int4", 1)
    assert [each.most_s for each in taken] == [20.0, 0.0]
    assert next(each.what for each in told if each.kind == "began") == "tuning of tiny int4"
    names = [part.name for part in parts(FULL)]
    assert names[1:3] == [f"tuning of llama-3.1-8b in {form}" for form in ("bfloat16", "int4")]


def test_what_transformers_cannot_do_is_told(monkeypatch):
    module = SimpleNamespace(__spec__=None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "transformers", module)
    told = peers.transformers_tokens_per_s({"num_hidden_layers": 1}, torch.device("cpu"))
    assert told.startswith("transformers could not: AttributeError")


def test_each_run_has_a_file_of_its_own(tmp_path):
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    reports = [Report(device="A B", date=when + timedelta(seconds=each)) for each in (0, 1)]
    paths = [report.write(tmp_path) for report in reports]
    assert paths[0].name == "gpu-2026-01-02-030405-a-b.json"
    assert paths[0] != paths[1]
    assert reports[0].write(tmp_path) == paths[0]


def test_the_time_goes_to_what_is_worth_most():
    first, one, other = FULL.shapes
    names = [part.name for part in parts(FULL)]
    order = [
        "ceilings", f"steps of {first} in bfloat16", f"the ladder of {first}, whole",
        "single kernels", f"steps of {other} in bfloat16", f"the ladder of {one}, compiled",
        f"steps of {other} in int8",
    ]  # fmt: skip
    assert [name for name in names if name in order] == order
    most = {
        part.arguments[:2]: part.arguments[2] for part in parts(FULL) if len(part.arguments) > 2
    }
    assert {most[shape, form] for shape in FULL.shapes for form in FULL.formats[:2]} == {None}


def test_the_compilers_rung_may_fail(monkeypatch):
    told = []
    progress = Progress(told.append, done=(), ends_at=time.time() + 600)
    settings = replace(MINIATURE, compiles=True)
    bench = Bench(device=HostDevice(), kernels=TorchKernels, settings=settings, progress=progress)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: 1 / 0)
    climb(bench, "tiny", "compiled")
    assert [each.kind for each in told] == ["began", "left out"]
    assert "ZeroDivisionError" in told[1].value


def test_datasheets_are_found_by_the_drivers_names():
    h200, missing = datasheet("NVIDIA H200"), datasheet("Some Other Device")
    assert h200 is not None
    assert h200.memory.bytes_per_s == 4.8e12
    assert h200.flops_per_s["bfloat16"] == 989e12
    assert missing is None


def test_it_needs_no_build():
    """The command of the Makefile runs on the sources alone."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu" in makefile
