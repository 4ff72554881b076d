"""How many threads there are, and jobs that run out of memory."""

import subprocess
import sys

import pytest
from tests.kernels.cpu.native import LEVELS

from ridgeline.core.host import cgroup_cores

NO_QUOTA = 1 << 16


@pytest.fixture
def cores(tmp_path):
    """Cores by a membership file and the files of control groups under a mount."""

    def count(membership, files):
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cgroup_cores(tmp_path / "cgroup", tmp_path / "mount")

    return count


def test_quota_of_a_container(cores):
    assert cores("0::/\n", {"cpu.max": "150000 100000\n"}) == 2
    assert cores("0::/\n", {"cpu.max": "max 100000\n"}) == NO_QUOTA


def test_the_least_quota_of_the_groups_above(cores):
    files = {
        "a.slice/cpu.max": "300000 100000\n",
        "a.slice/b.service/cpu.max": "max 100000\n",
        "a.slice/b.service/c/cpu.max": "800000 100000\n",
        "other.slice/cpu.max": "100000 100000\n",
    }
    assert cores("0::/a.slice/b.service/c\n", files) == 3


def test_quota_of_version_1(cores):
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "25000\n",
        "memory/job/cpu.max": "1 1\n",
    }
    assert cores("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", files) == 2


def test_a_container_that_sees_its_group_at_the_root(cores):
    files = {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert cores("3:cpuacct,cpu:/docker/0123\n", files) == 4


def test_files_that_say_nothing(cores, tmp_path):
    assert cores("0::/a\n", {"a/cpu.max": "what\n"}) == NO_QUOTA
    assert cores("", {}) == NO_QUOTA
    assert cgroup_cores(tmp_path / "none", tmp_path) == NO_QUOTA


# Draws whose candidates do not fit into what is left of the address space, on every thread of a
# pool, and then some that do.
WITHOUT_MEMORY = """
import resource, sys
import numpy as np
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.kernels.cpu.library import load_library
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import SAMPLING

pool = Pool(load_library(sys.argv[1]), 3)
logits = np.zeros(1 << 23, dtype=np.float32)
rows, tokens = np.zeros(12, dtype=SAMPLING), np.full(12, -5, dtype=np.int32)
rows["logits"], rows["temperature"], rows["top_p"] = logits.ctypes.data, 1.0, 0.9

def sample(vocab):
    pool.library.rl_sample(pool.handle, rows.ctypes.data, 12, vocab, tokens.ctypes.data)

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    try:
        sample(len(logits))
    except OutOfMemoryError as error:
        print(error)
    sample(1000)
    assert (tokens >= 0).all()
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_job_without_memory_raises_and_the_next_runs(level):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, level], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["The CPU kernels have no memory left (rl_sample)."] * 3
