"""Loads model folders named on standard input, one per line, and tells how each went, as JSON.

The outcome is ``loaded``, the name of a `RidgelineError`, or ``BROKEN`` and what was wrong. Run by
``test_fuzz_quantized.py``, by the harness of ``tests/weights``.
"""

import json
import logging
import sys
import time
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import RidgelineError
from ridgeline.engine.loading import load_model
from ridgeline.weights import expanded_weights, weight_shapes


def outcome(folder: Path) -> str:
    try:
        model = load_model(EngineConfig(model=str(folder), dtype="float32")).model
        weights = expanded_weights(model.weights, model.dtype)
        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        if found != weight_shapes(model.ops):
            return "BROKEN: other shapes than the model's"
        if any(weight.dtype.name != "float32" for weight in weights.values()):
            return "BROKEN: other dtypes than asked for"
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
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, started = memory_bytes("VmRSS"), time.process_time()
        told = outcome(Path(line.rstrip("\n")))
        spent_s = time.process_time() - started
        print(json.dumps([told, memory_bytes("VmHWM") - before, spent_s]), flush=True)


if __name__ == "__main__":
    main()
