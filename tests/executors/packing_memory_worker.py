"""Packs the models that it is given, one after the other, and prints the memory of each as JSON."""

import ctypes
import json
import sys
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.engine.loading import load_model
from ridgeline.executors.cpu.weights import pack_weights
from ridgeline.kernels.cpu.pool import shared_pool
from ridgeline.weights.matching import open_checkpoint


def status(key: str) -> int:
    """Bytes that ``/proc`` gives of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def memory_of(path: str, quantization: str | None) -> dict[str, int]:
    model = load_model(EngineConfig(model=path, quantization=quantization)).model
    with open_checkpoint(Path(path)) as file:
        largest_bytes = max(map(file.num_bytes, file.names()))
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    packed = pack_weights(shared_pool(), model)
    return {
        "peak": status("VmHWM") - before,
        "packed": packed.num_bytes,
        "largest": largest_bytes,
    }


first, *others = json.loads(sys.argv[1])
memory_of(*first)  # what is loaded with first use
print(json.dumps([memory_of(*each) for each in others]))
