"""Peak memory of loading, in a process of its own: what is loaded plus little, never twice that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
ROWS = [8, 1, 4, 2, 8, 1]  # MiB of bfloat16 each

CODE = """
import json, sys, torch
from pathlib import Path
from types import SimpleNamespace
from ridgeline.core.ops import Head, Weight
from ridgeline.weights import load_weights

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if key in line)

def load(folder, names_shapes):
    ops = [Head(weight=Weight(name=n, shape=tuple(s)), softcap=None) for n, s in names_shapes]
    sources = {n: SimpleNamespace(name=n) for n, _ in names_shapes}
    return load_weights(folder, ops=ops, sources=sources, ignored=[], dtype=dtype)

small, large, dtype, shapes = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
load(Path(small), [("w0", [64, 1024])])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
weights = load(Path(large), shapes)
print(json.dumps([status("VmHWM") - before, sum(w.nbytes for w in weights.values())]))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_is_what_is_loaded(tmp_path: Path, dtype: str) -> None:
    shapes = [(f"w{index}", [mib * 512, 1024]) for index, mib in enumerate(ROWS)]
    for folder, wanted in (("small", [("w0", [64, 1024])]), ("large", shapes)):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in wanted}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    argument = json.dumps([str(tmp_path / "small"), str(tmp_path / "large"), dtype, shapes])
    done = subprocess.run(
        [sys.executable, "-c", CODE, argument],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    peak_bytes, loaded_bytes = json.loads(done.stdout)
    assert loaded_bytes == sum(ROWS) * MIB * (1 if dtype == "bfloat16" else 2)
    assert loaded_bytes <= peak_bytes <= loaded_bytes + max(ROWS) * MIB + 4 * MIB
