"""Kills `quantize` at random moments, goes on, and compares with a run that was left alone.

Arguments: model folder, work folder, number of kills, seed. Prints one JSON object.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe

torch.set_num_threads(1)  # so that a forked process has no threads to miss


def run(folder: Path, out: Path, *, resume: bool) -> None:
    model = LayeredModel.open(str(folder))
    recipe = Recipe(window_tokens=48, num_windows=6, seed=1, tune=3)
    quantize(model, out, recipe, calibration_text("embedded", model.loaded, recipe), resume=resume)


def start(folder: Path, out: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            run(folder, out, resume=True)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def main() -> None:
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    num_kills, draw = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    begin_s = time.monotonic()
    child = start(folder, work / "whole")
    assert os.waitpid(child, 0)[1] == 0
    whole_s = time.monotonic() - begin_s
    kills, begun, failures = 0, 0, 0
    while kills < num_kills:
        out = work / f"killed-{begun}"
        while kills < num_kills:
            child = start(folder, out)
            time.sleep(draw.uniform(0, 0.6 * whole_s))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            if os.WIFSIGNALED(status):
                kills += 1
            else:
                failures += status != 0
                break
        begun += 1
    for number in range(begun):
        child = start(folder, work / f"killed-{number}")
        failures += os.waitpid(child, 0)[1] != 0
    print(json.dumps({"kills": kills, "folders": begun, "failures": failures}))


if __name__ == "__main__":
    main()
