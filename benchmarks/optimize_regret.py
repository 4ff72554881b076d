"""Regret of `ridgeline optimize` on machines that are otherwise than predicted, by simulation.

    python -m benchmarks.optimize_regret chat --runs 5 --noise 0.08

Each run plants other errors of the prediction on formats, KV and drafters, and noise on each visit.
Regret is that of the choice beside the best of all candidates that the race knew, without noise.
"""

import argparse
import random
from math import exp
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.optimize.machines import SimulatedMachine, pricer, task

from ridgeline.optimize import DEFAULT, Journal, Optimizer

_FORMATS = ("int8", "int4", "int4-g64", "int4-g128")
_DRAFTERS = ("ngram", "suffix", "draft", "adaptive")


def main() -> None:
    """Print a line for each run, and a summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=("chat", "rag", "agents", "batch"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run")
    parser.add_argument("--noise", type=float, default=0.08)
    parser.add_argument("--budget", type=float, default=240.0)
    arguments = parser.parse_args()
    regrets, worse, false_wins, challenged = [], 0, 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        machine = SimulatedMachine(
            pricer(), planted=_planted(arguments.workload, seed), noise=arguments.noise, seed=seed
        )
        with TemporaryDirectory() as folder:
            found = Optimizer(
                task(arguments.workload, budget_s=arguments.budget),
                pricer(),
                machine,
                Journal({"seed": seed}, Path(folder)),
                clock=machine.clock,
            ).find()
        true = {each: machine.true_ratio(each, found) for each in found.estimates}
        regrets.append(1 - true[found.winner] / max(true.values()))
        worse += found.winner != DEFAULT and true[found.winner] < 1.0
        challenged += found.same is not None
        false_wins += found.same is not None and not found.same.low <= 1 <= found.same.high
        print(
            f"{seed}: {found.winner.label}: × {true[found.winner]:.3f} of the default, regret "
            f"{regrets[-1]:.1%}, {len(machine.visited)} visits",
            flush=True,
        )
    within = sum(regret <= 0.05 for regret in regrets)
    print(
        f"{arguments.workload}: regret median {median(regrets):.1%}, worst {max(regrets):.1%}, "
        f"{within} of {len(regrets)} within 5 %; {worse} worse than the default; the default "
        f"differed from itself in {false_wins} of {challenged} proofs"
    )


def _planted(workload: str, seed: int) -> dict[tuple[str, object], float]:
    """How many times as long as predicted each change takes."""
    rng = random.Random(f"{workload}{seed}")
    found: dict[tuple[str, object], float] = {}
    for name in _FORMATS:
        found["quantization", name] = exp(rng.gauss(0.05, 0.2))
    found["kv_cache_dtype", "int8"] = exp(rng.gauss(0.0, 0.1))
    for name in _DRAFTERS:
        found["speculation", name] = exp(rng.gauss(0.15, 0.2))
    return found


if __name__ == "__main__":
    main()
