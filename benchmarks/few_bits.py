"""Decode of one token in formats of few bits, in turns, against what their bytes allow.

`python -m benchmarks.few_bits [--shape llama-3.2-1b] [--formats int4 int3 int2] [--rounds 5]`.
Random weights, a context of 128. The first format is what the others are compared with: `bytes` is
the ratio of the bytes of all matrices that multiply something, `time` that of the seconds (medians
of rounds), and `share` the second over the first.
"""

import argparse
import statistics

from ridgeline.bench.calibration import build
from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.models import PRESETS


def main() -> None:
    """Measure in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b", choices=PRESETS)
    parser.add_argument("--formats", nargs="+", default=["int4", "int3", "int2"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    config = dict(PRESETS[wanted.shape])
    if wanted.layers:
        config["num_hidden_layers"] = wanted.layers
    steps = [StepShape(batch_size=batch, num_tokens=1, context=128) for batch in wanted.batch]
    made = [build(wanted.shape, config, form, executor="cpu") for form in wanted.formats]
    timers = [StepTimer(model.executor, steps) for model in made]
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(wanted.rounds):
        for place, timer in enumerate(timers):
            for at, step in enumerate(steps):
                found.setdefault((place, at), []).append(statistics.median(timer.visit(step)))
    bits = [
        model.executor.bits_per_weight()
        for model in made
        if isinstance(model.executor, CPUExecutor)
    ]
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
    for model in made:
        model.executor.close()


if __name__ == "__main__":
    main()
