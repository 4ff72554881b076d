"""Ceilings: the native loops do the work they claim, and rounds are summed up as they should be."""

import ctypes
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ridgeline.bench import ceilings as ceilings_module
from ridgeline.bench.caches import CacheSizes, cache_sizes
from ridgeline.bench.ceilings import CeilingMeter, levels, measure_ceilings
from ridgeline.bench.conditions import Watch
from ridgeline.bench.native_loops import ArithmeticLoop, NativeLoops
from ridgeline.core.errors import MachineError
from ridgeline.core.formats import BFLOAT16

SOURCE = Path(__file__).parents[2] / "csrc" / "cpu" / "ceilings.cpp"


class FakeLoops:
    """Rates by pattern; reading the same again is faster, by as much each time."""

    read_patterns = ("one stream", "two streams", "one stream, prefetch 1 KB")
    arithmetic = tuple(
        ArithmeticLoop(index=index, name=name, number_format=number_format)
        for index, (name, number_format) in enumerate(
            [("fma", "float32"), ("slow", "bfloat16"), ("dot", "int8"), ("dot4", "int4")]
        )
    )

    def __init__(self) -> None:
        self.read: list[tuple[int, int, int]] = []

    def read_bytes_per_s(self, pattern, *, bytes_per_thread, threads, seconds):
        self.read.append((pattern, bytes_per_thread, threads))
        return [10.0, 30.0, 20.0][pattern] * self.read.count(self.read[-1])

    def operations_per_s(self, loop, *, threads, seconds):
        return {"float32": 100.0, "bfloat16": 90.0, "int8": 400.0, "int4": 500.0}[
            loop.number_format
        ]


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> NativeLoops:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = tmp_path_factory.mktemp("ceilings") / "libceilings.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return NativeLoops(ctypes.CDLL(str(library)))


def test_the_ceiling_is_the_best_loop_of_a_round_and_the_median_of_the_rounds():
    loops = FakeLoops()
    meter = CeilingMeter(loops, threads=2)
    for _ in range(3):
        meter.sample()
    report = meter.report()
    assert report.memory_bytes_per_s == 30.0 * 2
    assert report.reads["DRAM", 2].loop == "two streams"
    # Narrow products can be taken as wider ones, so their ceiling is never lower.
    assert report.operations["bfloat16"].rate == 100.0
    assert report.operations["int4"].rate == 500.0
    ceilings = report.ceilings()
    assert ceilings.memory.bytes_per_s == report.memory_bytes_per_s
    assert ceilings.measured
    assert ceilings.peak_flops(BFLOAT16) == 100.0


def test_everything_is_each_level_with_one_thread_and_with_all():
    loops = FakeLoops()
    meter = CeilingMeter(loops, threads=4)
    meter.sample_all()
    report = meter.report()
    assert set(report.reads) == {(name, n) for name in ("L1", "L2", "L3", "DRAM") for n in (1, 4)}
    near = max(level.working_set_bytes for level in levels(4)[:2])
    assert not any(pattern == 2 and size <= near for pattern, size, _ in loops.read)
    entry = report.to_json()["read"]["DRAM"]["4"]
    assert entry == {"bytes_per_s": report.memory_bytes_per_s, "loop": "two streams"}


def test_what_there_is_no_time_for_is_left_out_and_said(monkeypatch):
    """It was stopped at 38 s on a busy machine, instead of the half minute that it promises."""
    now = [0.0]

    class Slow(FakeLoops):
        def read_bytes_per_s(self, *arguments, **settings):
            now[0] += 1.0
            return super().read_bytes_per_s(*arguments, **settings)

    monkeypatch.setattr(ceilings_module.time, "monotonic", lambda: now[0])
    whole = measure_ceilings(Slow(), threads=2)
    assert whole.left_out == ()
    took_s, now[0] = now[0], 0.0
    report = measure_ceilings(Slow(), threads=2, until_s=took_s / 10)
    assert now[0] < took_s / 5
    assert report.left_out[0] == "L2 with 2 threads"
    assert report.to_json()["left_out"] == list(report.left_out)
    assert ("L3", 2) in report.reads
    assert ("L3", 1) not in report.reads
    now[0] = 100.0
    hasty = measure_ceilings(Slow(), threads=2, until_s=0.0)
    assert set(hasty.reads) == {("DRAM", 2)}
    assert hasty.ceilings().peak_flops(BFLOAT16) == 100.0


def test_working_sets_lie_in_the_level_that_they_measure():
    sizes = CacheSizes(l1_bytes=32 << 10, l2_bytes=1 << 20, l3_bytes=64 << 20, l3_cores=8)
    l1, l2, l3, dram = levels(16, sizes)
    assert l1.working_set_bytes < sizes.l1_bytes < l2.working_set_bytes < sizes.l2_bytes
    assert l3.size_bytes == 2 * sizes.l3_bytes  # sixteen cores have two of them
    assert sizes.l2_bytes < l3.working_set_bytes < sizes.l3_bytes / 8
    assert dram.working_set_bytes * 16 >= 4 * l3.size_bytes


def test_cache_sizes_are_read_as_linux_writes_them(tmp_path):
    entries = [
        ("Data", "1", "48K", "0"),
        ("Instruction", "1", "32K", "0"),
        ("Unified", "2", "2M", "0"),
        ("Unified", "3", "107520K", "0-23,48-71"),
    ]
    for index, (kind, level, size, shared) in enumerate(entries):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in zip(
            ("type", "level", "size", "shared_cpu_list"), (kind, level, size, shared), strict=True
        ):
            (folder / name).write_text(text + "\n")
    assert cache_sizes(tmp_path) == CacheSizes(
        l1_bytes=48 << 10, l2_bytes=2 << 20, l3_bytes=107520 << 10, l3_cores=48
    )
    assert cache_sizes(tmp_path / "none") == CacheSizes()


def test_native_loops_say_what_they_are_and_run_as_long_as_they_are_told(native):
    assert native.read_patterns[0] == "one stream"
    assert {loop.number_format for loop in native.arithmetic} >= {"float32", "int8"}
    start = time.perf_counter()
    rates = [native.operations_per_s(loop, threads=2, seconds=0.02) for loop in native.arithmetic]
    assert time.perf_counter() - start >= 0.02 * len(rates)
    assert all(rate > 1e6 for rate in rates)
    sizes = (4 << 10, 1 << 20)
    for pattern in range(len(native.read_patterns)):
        for size in sizes:
            rate = native.read_bytes_per_s(pattern, bytes_per_thread=size, threads=2, seconds=0.01)
            assert rate > 1e6


def test_what_cannot_be_measured_is_an_error(native):
    with pytest.raises(MachineError):
        native.read_bytes_per_s(0, bytes_per_thread=1 << 60, threads=1, seconds=0.01)
    with pytest.raises(MachineError):
        native.read_bytes_per_s(10_000, bytes_per_thread=1 << 20, threads=1, seconds=0.01)


def test_conditions_tell_own_work_from_that_of_others():
    watch = Watch()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    other = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        before = watch.others_share()
        disturbed = Watch()
        time.sleep(1.0)
        share = disturbed.others_share()
    finally:
        other.kill()
        other.wait()
    conditions = watch.conditions(threads=2)
    assert 0.0 <= before <= 1.0
    assert share > 0.05
    assert conditions["cpu"]
    assert conditions["threads"] == 2
