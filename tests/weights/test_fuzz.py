"""Damaged files: never a crash, a hang or a heap of memory; an error of ours, or a right load.

The cases run in a process that is watched: one that dies or does not answer is noted with its case,
and the next process goes on behind it. A case may take `LIMIT_S` of processor time; by the clock it
may take longer, since the machine may be busy.
"""

import importlib.util
import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

HERE = Path(__file__).parent
LIMIT_S = 5.0
CLOCK_LIMIT_S = 120.0
START_LIMIT_S = 180.0
SPARE_BYTES = 48 << 20
MUTATIONS = [300, pytest.param(1000, marks=pytest.mark.slow)]

_spec = importlib.util.spec_from_file_location("fuzz_cases", HERE / "fuzz_cases.py")
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


@dataclass
class Verdict:
    outcome: str
    peak_bytes: int = 0
    cpu_s: float = 0.0


class Watched:
    """A worker process, started anew after each crash or hang."""

    def __init__(
        self, command: list[str], limit_s: float, start_limit_s: float = START_LIMIT_S
    ) -> None:
        self.command, self.limit_s, self.start_limit_s = command, limit_s, start_limit_s
        self.process: subprocess.Popen[str] | None = None

    def run(self, folder: Path) -> Verdict:
        fresh = self.process is None
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=self.limit_s + (self.start_limit_s if fresh else 0.0))
        except queue.Empty:
            self.stop()
            return Verdict("HANG")
        if not line:
            code = self.process.wait()
            self.stop()
            return Verdict(f"CRASH: exit status {code}")
        return Verdict(*json.loads(line))

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                assert stream is not None
                stream.close()
            self.process = None

    def _start(self) -> None:
        self.process = process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        lines, stream = self.lines, process.stdout

        def pump() -> None:
            assert stream is not None
            try:
                for line in stream:
                    lines.put(line)
                lines.put("")
            except ValueError:  # closed after a kill
                pass

        threading.Thread(target=pump, daemon=True).start()


def model() -> tuple[dict[str, list[int]], bytes, dict[str, bytes]]:
    """Shapes of the float tensors, the model as one file, and as an index with two shards."""
    generator = torch.Generator().manual_seed(11)
    tensors = {
        "a.0": torch.randn(8, 16, generator=generator),
        "a.1": torch.randn(16, generator=generator).half(),
        "b.0": torch.randn(4, 4, 4, generator=generator).bfloat16(),
        "b.1": torch.randn(3, 5, generator=generator).double(),
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    tensors["int.0"] = torch.arange(9)
    shards = {
        f"model-0000{index}-of-00002.safetensors": names
        for index, names in ((1, ["a.0", "b.1", "int.0"]), (2, ["a.1", "b.0"]))
    }
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    sharded = {s: save({n: tensors[n] for n in names}) for s, names in shards.items()}
    sharded[cases.INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return shapes, save(tensors, {"format": "pt"}), sharded


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_damaged_files(tmp_path: Path, mutations: int, counted: Callable[[int], None]) -> None:
    shapes, single, sharded = model()
    command = [sys.executable, str(HERE / "fuzz_worker.py"), json.dumps(shapes)]
    worker = Watched(command, CLOCK_LIMIT_S)
    bad: dict[str, object] = {}
    tally: Counter[str] = Counter()
    outcomes: dict[str, str] = {}
    for name, folder in cases.write_cases(tmp_path, single, sharded, mutations, seed=2024):
        verdict = worker.run(folder)
        tally[verdict.outcome] += 1
        outcomes[name] = verdict.outcome
        size = sum(file.stat().st_size for file in folder.iterdir())
        if verdict.outcome.startswith(("BROKEN", "CRASH", "HANG")):
            bad[name] = verdict.outcome
        elif verdict.peak_bytes > 2 * size + SPARE_BYTES:
            bad[name] = f"{verdict.peak_bytes / size:.0f} times the file in memory"
        elif verdict.cpu_s > LIMIT_S:
            bad[name] = f"{verdict.cpu_s:.1f} s"
    worker.stop()
    assert not bad, bad
    assert tally["loaded"] > 15, tally  # flips in the data, among others
    assert tally["CorruptFileError"] > 200, tally
    fine = {n for n, o in outcomes.items() if o == "loaded" and "mutation" not in n}
    assert fine == {
        "dtype-f8", "header-empty-object", "header-trailing-spaces", "header-many-empty-tensors",
        "zero-size", "scalar", "name-nul", "name-newline-escape", "name-empty",
        "name-of-a-megabyte", "metadata-fine",
    }  # fmt: skip
    counted(sum(tally.values()))


SHAM_WORKER = """
import os, sys, time
for line in sys.stdin:
    if "crash" in line:
        os.abort()
    if "hang" in line:
        time.sleep(600)
    print('["loaded", 0]', flush=True)
"""


def test_the_harness_names_the_case_that_crashes_or_hangs_and_goes_on() -> None:
    worker = Watched([sys.executable, "-c", SHAM_WORKER], 5.0, start_limit_s=120.0)
    names = ("1-fine", "2-crash", "3-fine", "4-fine", "5-hang", "6-fine")
    told = [worker.run(Path(name)).outcome for name in names]
    worker.stop()
    assert told == ["loaded", "CRASH: exit status -6", "loaded", "loaded", "HANG", "loaded"]
