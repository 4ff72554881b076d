"""Peak memory of loading, in a process of its own: what is loaded plus little, never twice that."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

MIB = 1 << 20
ROWS = [8, 1, 4, 2, 8, 1]  # MiB of bfloat16 each

CODE = """
import json, sys
from pathlib import Path
from ridgeline.core.ops import Head, Weight
from ridgeline.models import TensorSource
from ridgeline.weights import CheckpointWeights

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if key in line)

def load(folder, names_shapes, dtype):
    ops = [Head(weight=Weight(name=n, shape=tuple(s)), softcap=None) for n, s in names_shapes]
    sources = {n: TensorSource(name=n) for n, _ in names_shapes}
    weights = CheckpointWeights(path=folder, ops=ops, sources=sources, ignored=[], dtype=dtype)
    return dict(weights.values())

small, large, shapes = json.loads(sys.argv[1])
peaks = {}
for dtype in ("bfloat16", "float32"):
    load(Path(small), [("w0", [64, 1024])], dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    weights = load(Path(large), shapes, dtype)
    peaks[dtype] = [status("VmHWM") - before, sum(w.nbytes for w in weights.values())]
    del weights
print(json.dumps(peaks))
"""


def test_peak_is_what_is_loaded(tmp_path: Path) -> None:
    shapes = [(f"w{index}", [mib * 512, 1024]) for index, mib in enumerate(ROWS)]
    for folder, wanted in (("small", [("w0", [64, 1024])]), ("large", shapes)):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in wanted}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    argument = json.dumps([str(tmp_path / "small"), str(tmp_path / "large"), shapes])
    done = subprocess.run(
        [sys.executable, "-c", CODE, argument],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    for dtype, (peak_bytes, loaded_bytes) in json.loads(done.stdout).items():
        assert loaded_bytes == sum(ROWS) * MIB * (1 if dtype == "bfloat16" else 2)
        # Some of it may lie in pages that were the process's own before.
        least, most = loaded_bytes - 2 * MIB, loaded_bytes + (max(ROWS) + 4) * MIB
        assert least <= peak_bytes <= most, dtype
