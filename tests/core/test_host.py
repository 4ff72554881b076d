"""Memory that this process may take: the least of the machine's, its groups' and its own limit."""

import subprocess
import sys

import pytest

from ridgeline.core.host import cgroup_memory_bytes


def write_group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def room(tmp_path):
    """Writes the membership; returns what the groups under ``tmp_path / "mount"`` leave."""

    def ask(text):
        (tmp_path / "cgroup").write_text(text)
        return cgroup_memory_bytes(tmp_path / "cgroup", tmp_path / "mount")

    return ask


def test_the_tightest_group_above_counts(tmp_path, room):
    mount = tmp_path / "mount"
    stat = "anon 5\ninactive_file 300\nactive_file 7"
    write_group(mount / "a" / "b", memory_max="max", memory_current=10, memory_stat=stat)
    write_group(mount / "a", memory_max=5000, memory_current=4000, memory_stat=stat)
    assert room("0::/a/b\n") == 1300
    write_group(mount / "a" / "b", memory_max=900, memory_current=10)
    assert room("0::/a/b\n") == 1190


def test_version_1(tmp_path, room):
    group = tmp_path / "mount" / "memory"
    stat = "inactive_file 1\ntotal_inactive_file 20"
    write_group(group, memory_limit_in_bytes=700, memory_usage_in_bytes=600, memory_stat=stat)
    assert room("4:memory:/somewhere\n3:cpu:/x\n") == 120  # a container sees its group at the root


@pytest.mark.parametrize("text", ["", "nonsense", "0::/a\n", "4:memory:/a\n"])
def test_no_limit_is_more_than_a_machine_has(room, text):
    assert room(text) > 1 << 60


UNDER_A_LIMIT = """
import resource, sys
import psutil
from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import RidgelineError

limit = psutil.Process().memory_info().vms + (int(sys.argv[2]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with LLM(sys.argv[1], executor="cpu", dtype="float32") as llm:
        llm.generate("the cat", SamplingParams(max_tokens=2))
        print(llm.config.kv_cache_bytes >> 20)
except RidgelineError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("spare_mib", [0, 2, 400])
def test_an_engine_keeps_to_a_limit_or_says_that_it_cannot(model_folder, spare_mib):
    command = [sys.executable, "-c", UNDER_A_LIMIT, str(model_folder), str(spare_mib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if spare_mib == 400:
        assert 1 < int(done.stdout) < 400, done.stderr
    else:
        assert done.stdout.startswith("OutOfMemoryError"), done.stdout + done.stderr
