"""Reads GGUF files named on standard input, one per line, and tells how each went, as JSON.

A process of its own, so that a crash is the case's and not the test's. The outcome is ``loaded``,
the name of a `RidgelineError`, or ``BROKEN`` and what was wrong. Run by ``test_gguf_fuzz.py``.
"""

import json
import sys
import time
from pathlib import Path

from ridgeline.core.errors import RidgelineError
from ridgeline.models import lower
from ridgeline.text import tokenizer_from_gguf
from ridgeline.weights import CheckpointWeights
from ridgeline.weights.gguf import GGUFCheckpoint, GGUFFile, describe_gguf


def read_all(path: Path) -> None:
    """Every tensor, by both ways, which must agree; then the model and its tokenizer."""
    with GGUFFile(path) as file:
        for name, entry in file.tensors.items():
            rows = (entry.stop - entry.start) // entry.format.num_bytes(entry.shape[-1])
            read = file.read_rows(name, 0, rows)
            if read.tobytes() != file.blocks(name).data.tobytes():
                raise AssertionError(f"two values of {name!r}")
    with GGUFCheckpoint(path) as checkpoint:
        definition = describe_gguf(checkpoint)
        tokenizer = tokenizer_from_gguf(checkpoint.metadata)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("Hello world\n  12 é <|x|>")[:64])
    weights = CheckpointWeights(
        path=path,
        ops=lower(definition.spec),
        sources=definition.sources,
        ignored=definition.ignored,
        dtype="float32",
    )
    dict(weights.values())


def outcome(path: Path) -> str:
    try:
        read_all(path)
        return "loaded"
    except RidgelineError as error:
        message = str(error)
        if len(message) > 2000 or not message.isprintable():
            return f"BROKEN: message {message[:100]!r}"
        return type(error).__name__
    except BaseException as error:
        return f"BROKEN: {type(error).__name__}: {str(error)[:200]}"


def memory_bytes(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def main() -> None:
    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, start = memory_bytes("VmRSS"), time.process_time()
        told = outcome(Path(line.rstrip("\n")))
        cpu_s = time.process_time() - start
        print(json.dumps([told, memory_bytes("VmHWM") - before, cpu_s]), flush=True)


if __name__ == "__main__":
    main()
