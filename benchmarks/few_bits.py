"""Steps in formats of few bits, in turns, against what their bytes allow.

`python -m benchmarks.few_bits [--shape llama-3.2-1b] [--formats int4 int3 int2] [--rounds 5]`.
Random weights, a context of 128. The first format is what the others are compared with: `bytes` is
the ratio of the bytes of all matrices that multiply something, `time` that of the seconds (medians
of rounds), and `share` the second over the first. `ternary` is a file's weights of −1, 0 and 1 with
a scale for each matrix, its head in six bits.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.bench.calibration import describe_model
from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.core.config import EngineConfig
from ridgeline.core.op_facts import Role
from ridgeline.core.plan import ModelRole
from ridgeline.core.weight_uses import weight_roles
from ridgeline.executors import create_executor
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import PRESETS
from ridgeline.quant import QuantizedTensor
from ridgeline.quant.bitnet import TERNARY
from ridgeline.weights import Weight


@dataclass(frozen=True)
class _Ternary:
    """The weights of a model, its products rounded to −1, 0 and 1."""

    model: ExecutorModel

    def items(self) -> Iterator[tuple[str, Weight]]:
        roles = weight_roles(self.model.ops)
        for name, weight in self.model.weights.items():
            if roles[name] != {Role.PRODUCT} or not isinstance(weight, np.ndarray):
                yield name, weight
                continue
            codes = np.clip(np.rint(weight.astype(np.float32) * weight.shape[-1] ** 0.5), -1, 1)
            scale = np.full((1, 1), weight.shape[-1] ** -0.5, dtype=np.float32)
            yield name, QuantizedTensor(format=TERNARY, codes=codes.astype(np.int8), scales=scale)


def _executor(config: dict[str, object], form: str) -> CPUExecutor:
    model = describe_model(config, "int2" if form == "ternary" else form)
    if form == "ternary":
        model = replace(model, weights=_Ternary(model))
    settings = EngineConfig(executor="cpu", block_tokens=16, packed_cache_path="off")
    made = create_executor({ModelRole.TARGET: model}, settings)
    assert isinstance(made, CPUExecutor)
    return made


def main() -> None:
    """Measure in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b", choices=PRESETS)
    parser.add_argument("--formats", nargs="+", default=["int4", "int3", "int2"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, nargs="*", default=[], help="tokens of a prompt")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    config = dict(PRESETS[wanted.shape])
    if wanted.layers:
        config["num_hidden_layers"] = wanted.layers
    steps = [StepShape(batch_size=batch, num_tokens=1, context=128) for batch in wanted.batch]
    steps += [StepShape(batch_size=1, num_tokens=count, context=0) for count in wanted.prompt]
    made = [_executor(config, form) for form in wanted.formats]
    timers = [StepTimer(executor, steps) for executor in made]
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(wanted.rounds):
        for place, timer in enumerate(timers):
            for at, step in enumerate(steps):
                found.setdefault((place, at), []).append(statistics.median(timer.visit(step)))
    bits = [executor.bits_per_weight() for executor in made]
    for at, step in enumerate(steps):
        first = statistics.median(found[0, at])
        for place, form in enumerate(wanted.formats):
            seconds = statistics.median(found[place, at])
            by_bytes, by_time = bits[0] / bits[place], first / seconds
            print(
                f"{step} {form}: {bits[place]:.3f} bits, {seconds * 1e3:.2f} ms "
                f"({min(found[place, at]) * 1e3:.2f} to {max(found[place, at]) * 1e3:.2f}), "
                f"bytes {by_bytes:.2f}, time {by_time:.2f}, share {by_time / by_bytes:.1%}"
            )
    for executor in made:
        executor.close()


if __name__ == "__main__":
    main()
