"""Reads model folders named on standard input, one per line, and tells how each went, as JSON.

A process of its own, so that a crash is the case's and not the test's. The outcome is ``loaded``,
the name of a `RidgelineError`, or ``BROKEN`` and what was wrong. Run by ``test_fuzz.py``.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load

from ridgeline.core.arrays import Array, empty
from ridgeline.core.errors import RidgelineError
from ridgeline.core.ops import Head, Weight
from ridgeline.models import TensorSource
from ridgeline.weights import Checkpoint, CheckpointWeights


def bits(tensor: Array | torch.Tensor) -> bytes:
    if not isinstance(tensor, torch.Tensor):
        return tensor.tobytes()
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def read_all(folder: Path) -> dict[str, Array]:
    """Every tensor, by both ways, which must agree."""
    tensors = {}
    with Checkpoint(folder) as checkpoint:
        for name in checkpoint.names():
            view = checkpoint.tensor(name)
            out = empty(checkpoint.shape(name), checkpoint.dtype(name))
            checkpoint.read_into(name, out)
            if bits(view) != bits(out):
                raise AssertionError(f"two values of {name!r}")
            tensors[name] = out
    return tensors


def compare(folder: Path, tensors: dict[str, Array]) -> None:
    """What we accept, the safetensors library accepts too, with the same values."""
    expected = {}
    for file in sorted(folder.glob("*.safetensors")):
        expected |= load(file.read_bytes())
    if expected.keys() != tensors.keys():
        raise AssertionError("other names than the library")
    for name, want in expected.items():
        got, kind = tensors[name], str(want.dtype).removeprefix("torch.")
        if (got.dtype.name, got.shape, bits(got)) != (kind, tuple(want.shape), bits(want)):
            raise AssertionError(f"another value of {name!r} than the library")


def load_as_model(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Load through the ops of the unharmed model; any `RidgelineError` will do."""
    ops = [Head(weight=Weight(name=n, shape=tuple(s)), softcap=None) for n, s in shapes.items()]
    sources = {name: TensorSource(name=name) for name in shapes}
    try:
        weights = CheckpointWeights(
            path=folder, ops=ops, sources=sources, ignored=[r"int\..*"], dtype="float32"
        )
        dict(weights.values())
    except RidgelineError as error:
        str(error).encode("ascii")


def outcome(folder: Path, shapes: dict[str, list[int]]) -> str:
    try:
        try:
            tensors = read_all(folder)
        except RidgelineError as error:
            message = str(error)
            if len(message) > 2000 or not message.isascii() or not message.isprintable():
                return f"BROKEN: message {message[:100]!r}"
            load_as_model(folder, shapes)
            return type(error).__name__
        compare(folder, tensors)
        load_as_model(folder, shapes)
        return "loaded"
    except BaseException as error:
        return f"BROKEN: {type(error).__name__}: {str(error)[:200]}"


def memory_bytes(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def main() -> None:
    shapes = json.loads(sys.argv[1])
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory_bytes("VmRSS")
        start = time.process_time()
        told = outcome(folder, shapes)
        cpu_s = time.process_time() - start
        print(json.dumps([told, memory_bytes("VmHWM") - before, cpu_s]), flush=True)


if __name__ == "__main__":
    main()
