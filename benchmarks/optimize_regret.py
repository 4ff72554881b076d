"""Regret of `ridgeline optimize` on machines that are otherwise than predicted, by simulation.

    python -m benchmarks.optimize_regret chat --runs 5 --noise 0.08
    python -m benchmarks.optimize_regret chat --grid 12 --budget 40

Each run plants other errors of the prediction on formats, KV and drafters, and noise on each visit.
Regret is that of the choice beside the best of all candidates that the race knew, without noise.

With ``--grid N`` on the embedded model and this machine instead: the ``N`` candidates that the race
thought best are measured in turns with the default, and the best five of these and the choice in
further turns, of which regret is: the best of many noisy values is too good.
"""

import argparse
import json
import random
import time
from itertools import count
from math import exp, log
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from tests.optimize.machines import SimulatedMachine, predictor, task

from ridgeline.cli.hardware import calibration_of, this_engine_memory
from ridgeline.core.config import EngineConfig
from ridgeline.engine.loading import load_model
from ridgeline.evaluation import heldout_texts
from ridgeline.executors import executor_traits
from ridgeline.optimize import (
    DEFAULT,
    Candidate,
    CandidatePredictor,
    EngineMeasurer,
    Journal,
    Optimizer,
)
from ridgeline.optimize.objective import value

_FORMATS = ("int8", "int4", "int4-g64", "int4-g128")
_FINALISTS, _TURNS = 5, 3
_DRAFTERS = ("ngram", "suffix", "draft", "adaptive")


def main() -> None:
    """Print a line for each run, and a summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=("chat", "rag", "agents", "batch"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run")
    parser.add_argument("--noise", type=float, default=0.08)
    parser.add_argument("--budget", type=float, default=240.0)
    parser.add_argument("--grid", type=int, metavar="N", help="candidates, on real engines")
    arguments = parser.parse_args()
    if arguments.grid is not None:
        print(json.dumps(_measured(arguments.workload, arguments.budget, arguments.grid)))
        return
    regrets, worse, false_wins, challenged = [], 0, 0, 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        machine = SimulatedMachine(
            predictor(),
            planted=_planted(arguments.workload, seed),
            noise=arguments.noise,
            seed=seed,
        )
        with TemporaryDirectory() as folder:
            found = Optimizer(
                task(arguments.workload, budget_s=arguments.budget),
                predictor(),
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


def _measured(workload: str, budget_s: float, size: int) -> dict[str, Any]:
    """Optimize on real engines, then measure the grid."""
    base = EngineConfig()
    loaded, traits = load_model(base), executor_traits("cpu")
    memory_bytes, kv_share = this_engine_memory("cpu")
    calibration = calibration_of("cpu", anew=False)
    predicted = CandidatePredictor(
        base, loaded, traits, calibration, memory_bytes=memory_bytes, kv_share=kv_share
    )
    assert loaded.tokenizer is not None
    corpus = [token for text in heldout_texts() for token in loaded.tokenizer.encode(text)]
    measurer = EngineMeasurer(base, corpus, most_open=_FINALISTS + 2)
    asked = task(workload, budget_s=budget_s)
    try:
        with TemporaryDirectory() as folder:
            journal = Journal({}, Path(folder))
            found = Optimizer(asked, predicted, measurer, journal).find()
        print(f"{found.winner.label} in {found.spent_s:.0f} s", flush=True)
        known = sorted(found.estimates, key=lambda each: -found.estimates[each].mean)
        began_s, seeds = time.monotonic(), count(1000)

        def log_ratio(candidate: Candidate) -> float:
            one, other = (
                measurer.visit(each, found.arrivals, seed=next(seeds)).outcomes
                for each in (candidate, DEFAULT)
            )
            return log(
                value(asked.objective, one, asked.slo) / value(asked.objective, other, asked.slo)
            )

        grid = {each: log_ratio(each) for each in known[:size] if each != DEFAULT}
        grid_s = time.monotonic() - began_s
        print(f"a grid of {len(grid)} in {grid_s:.0f} s", flush=True)
        finalists = sorted(grid, key=lambda each: -grid[each])[:_FINALISTS]
        finalists += [found.winner] if found.winner not in (*finalists, DEFAULT) else []
        turns = [[log_ratio(each) for each in finalists] for _ in range(_TURNS)]
        final = {DEFAULT: 1.0}
        final |= {each: exp(mean(logs)) for each, *logs in zip(finalists, *turns, strict=True)}
    finally:
        measurer.close()
    return {
        "workload": workload,
        "choice": found.winner.label,
        "optimize_s": found.spent_s,
        "visits": len(found.visits),
        "grid_s": grid_s,
        "grid": {each.label: exp(ratio) for each, ratio in grid.items()},
        "finalists": {each.label: ratio for each, ratio in final.items()},
        "regret": 1 - final[found.winner] / max(final.values()),
    }


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
