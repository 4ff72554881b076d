"""Whether kernels are faster with each thread pinned to a processor: in turns, on one engine.

`python -m benchmarks.thread_pinning [--model llama-3.2-1b] [--quantization int4] [--rounds 5]`.
The two parts are decode at batch 1 and a prompt of 512 tokens; a ratio over 1 speaks for pinning.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ridgeline import LLM, SamplingParams


def busiest_threads(run: Callable[[], object], count: int) -> list[int]:
    """The ids of the threads that take most processor time in a run."""

    def ticks() -> dict[int, int]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = int(fields[11]) + int(fields[12])
        return found

    before = ticks()
    run()
    after = ticks()
    spent = {tid: now - before.get(tid, 0) for tid, now in after.items()}
    return sorted(spent, key=spent.__getitem__, reverse=True)[:count]


def main() -> None:
    """Measure in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))
    with LLM(
        wanted.model,
        load_format="dummy",
        quantization=wanted.quantization,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
    ) as llm:

        def run(num_prompt: int, num_output: int) -> float:
            """Seconds of a prompt and what follows."""
            prompt = [[(7 * i) % 1000 + 5 for i in range(num_prompt)]]
            params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
            began_s = time.perf_counter()
            llm.generate(prompt, params)
            return time.perf_counter() - began_s

        parts = {"decode of 24": (8, 25), "prompt of 512": (512, 1)}
        threads = busiest_threads(lambda: run(*parts["decode of 24"]), len(processors))
        seconds: dict[tuple[str, bool], list[float]] = {}
        for number in range(2 * wanted.rounds):
            pinned = number % 2 == 1
            for thread, processor in zip(threads, processors, strict=False):
                os.sched_setaffinity(thread, {processor} if pinned else set(processors))
            for name, sizes in parts.items():
                seconds.setdefault((name, pinned), []).append(run(*sizes))
    for name in parts:
        free, pinned_s = (seconds[name, pinned] for pinned in (False, True))
        ratios = [a / b for a, b in zip(free, pinned_s, strict=True)]
        print(
            f"{name}: free {statistics.median(free) * 1e3:.0f} ms, pinned "
            f"{statistics.median(pinned_s) * 1e3:.0f} ms, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
