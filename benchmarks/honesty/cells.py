"""Some of the test's models alone, by the calibration that this machine has: 20 seconds.

    python -m benchmarks.honesty.cells experts:bfloat16 wide:int3 --rounds 3

Predictions are printed before anything is measured. ``corrected``: at the speed that plain steps of
the first model show, which a running engine learns from its own; so the rest is what kinds of
steps, experts and formats add.
"""

import argparse
import json
from statistics import median
from typing import Any

from benchmarks.honesty import cases
from benchmarks.honesty.report import priced
from ridgeline.bench.calibration import build, measure_in_turns, short_steps
from ridgeline.bench.conditions import Watch
from ridgeline.bench.step_timing import StepShape
from ridgeline.cli.hardware import calibration_of
from ridgeline.core.host import usable_cores
from ridgeline.core.plan import ModelRole
from ridgeline.roofline.calibration import Calibration, describe
from ridgeline.roofline.predict import StepPredictor

EXECUTOR = "cpu"


def main() -> None:
    """Predict, measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="SHAPE:FORMAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the plain steps")
    arguments = parser.parse_args()
    models = [tuple(each.split(":")) for each in arguments.models]
    calibration, watch = calibration_of(EXECUTOR, anew=False), Watch()
    plain = [step for step in cases.TEST_STEPS if step.kind == step.phase][:: arguments.every]
    steps = [*plain, *(step for step in cases.TEST_STEPS if step.kind != step.phase)]
    planned = []
    for shape, form in models:
        few = short_steps(priced(EXECUTOR, shape, form), calibration.ceilings, steps)
        claims = {str(step): _seconds(calibration, shape, form, step) for step in few}
        print(json.dumps({"model": f"{shape} {form}", "predicted_s": claims}), flush=True)
        planned.append((shape, form, few))
    built = [
        (build(shape, cases.ALL_SHAPES[shape], form, executor=EXECUTOR), few)
        for shape, form, few in planned
    ]
    measured = measure_in_turns(built, rounds=arguments.rounds)
    rows: list[dict[str, Any]] = [
        {
            "model": f"{times.shape} {times.format}",
            "step": str(times.step),
            "kind": times.step.kind,
            "phase": times.step.phase,
            "measured_s": times.seconds,
            "ratio": times.seconds / _seconds(calibration, times.shape, times.format, times.step),
        }
        for of_model in measured
        for times in of_model
    ]
    speed = {
        phase: median(
            row["ratio"]
            for row in rows
            if row["model"] == rows[0]["model"] and row["kind"] == row["phase"] == phase
        )
        for phase in ("decode", "prefill")
    }
    groups: dict[str, list[float]] = {}
    for row in rows:
        error = abs(speed[row["phase"]] / row["ratio"] - 1)
        groups.setdefault(f"{row['model']}, {row['kind']}", []).append(error)
    found = {
        name: {"count": len(each), "median": median(each), "worst": max(each)}
        for name, each in groups.items()
    }
    print(
        json.dumps(
            {
                "calibration": describe(calibration),
                "speed": speed,
                "corrected_errors": found,
                "steps": rows,
                "conditions": dict(watch.conditions(threads=usable_cores())),
            },
            indent=1,
        )
    )


def _seconds(calibration: Calibration, shape: str, form: str, step: StepShape) -> float:
    predictor = StepPredictor({ModelRole.TARGET: priced(EXECUTOR, shape, form)}, calibration)
    return predictor.batch_seconds(step.batch)


if __name__ == "__main__":
    main()
