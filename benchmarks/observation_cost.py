"""What watching costs, and how fast plans are simulated.

    python benchmarks/observation_cost.py [--model NAME] [--batch 1,8,64] [--skip-simulation]

Runs decode steps of a model (the embedded one, whose steps are short) on the default executor and
keeps their plans and results. Then the observer of the roofline is timed alone on them: a step's
microseconds (the first by itself), and their share of its own time. Then one minute of 1,000 users,
each sending 500 tokens and reading 150 once a minute, is simulated on an H100 with an 8B model.
Prints JSON.
"""

import argparse
import json
import time
from collections.abc import Sequence
from math import ceil
from statistics import median

from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.request import Request
from ridgeline.core.result import StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.loading import load_model
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.observing import make_observer
from ridgeline.executors import create_executor
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import catalogue_machine, poisson, simulate
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import typical
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.live import Observer
from ridgeline.roofline.predict import StepPredictor
from ridgeline.scheduler import Scheduler, SchedulerConfig

_PROMPT, _OUTPUT = 64, 160
_POOL_BYTES = 256 << 20
_USERS = 1000
_LEAST_STEPS = 4000  # a model is priced once for all, at its first step


class _Recorder:
    """Keeps what the engine's loop tells an observer."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepPlan, StepResult, float]] = []

    def observe(self, plan: StepPlan, result: StepResult, measured_s: float) -> None:
        self.steps.append((plan, result, measured_s))


def observe(name: str | None, batch: int) -> dict[str, float | int | bool]:
    """Decode ``batch`` sequences; then time the observer alone on the same steps."""
    config = EngineConfig(model=name, max_num_seqs=batch, decode_replay_s=0.0)
    loaded = load_model(config)
    models = {ModelRole.TARGET: loaded.model}
    executor = create_executor(models, config)
    layout = executor.kv_layout()
    resolved = resolve(
        EngineConfig(max_num_seqs=batch, max_model_len=256, kv_cache_memory_bytes=_POOL_BYTES),
        spec=loaded.model.spec,
        executor=executor.name,
        dtype=loaded.model.dtype,
        block_bytes=layout.block_bytes,
        free_bytes=0,
    )
    executor.allocate_kv(resolved.num_blocks)
    windows = tuple(group.window for group in layout.groups)
    recorder = _Recorder()
    loop = EngineLoop(
        executor,
        Scheduler(SchedulerConfig.of_engine(config, resolved, windows=windows)),
        None,
        observer=recorder,
    )
    params = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True, temperature=0.0)
    for number in range(batch):
        prompt = tuple(range(number + 1, number + 1 + _PROMPT))
        loop.add(Request(request_id=number, prompt_token_ids=prompt, params=params, seed=number))
    while loop.has_work:
        loop.step()
    observer = make_observer(config, models, executor)
    is_calibrated = observer.predictor is not None
    if not is_calibrated:  # predicting costs the same with any figures
        priced = observer.models
        ceilings = load_catalogue().device("epyc-9654").ceilings()
        observer = Observer(priced, StepPredictor(priced, typical(ceilings)))
    executor.close()
    first, *later = recorder.steps * ceil(_LEAST_STEPS / len(recorder.steps))
    first_s = _seconds(observer, [first])
    per_step_s = _seconds(observer, later) / len(later)
    step_s = median(seconds for _, _, seconds in recorder.steps)
    return {
        "batch": batch,
        "steps": len(later),
        "step_us": step_s * 1e6,
        "first_us": first_s * 1e6,
        "observer_us": per_step_s * 1e6,
        "share": per_step_s / step_s,
        "calibrated": is_calibrated,
    }


def _seconds(observer: Observer, steps: Sequence[tuple[StepPlan, StepResult, float]]) -> float:
    start = time.perf_counter()
    for step in steps:
        observer.observe(*step)
    return time.perf_counter() - start


def simulate_users() -> dict[str, float | int]:
    """A minute of 1,000 users on one H100 with Llama-3.1-8B in 16 bits."""
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    model = PricedModel(spec=spec, ops=lower(spec))
    machine = catalogue_machine(load_catalogue(), "h100")
    arrivals = poisson(
        rate_rps=_USERS / 60, num_requests=_USERS, prompt_tokens=500, output_tokens=150, seed=1
    )
    config = EngineConfig(max_num_seqs=256, max_model_len=1024)
    start = time.perf_counter()
    traffic = simulate(model, machine.calibration, arrivals, config, kv_pool_bytes=50e9)
    return {
        "users": _USERS,
        "simulated_s": traffic.seconds,
        "steps": traffic.num_steps,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--skip-simulation", action="store_true")
    arguments = parser.parse_args()
    found = [observe(arguments.model, int(part)) for part in arguments.batch.split(",")]
    result = {"observation": found}
    if not arguments.skip_simulation:
        result["simulation"] = simulate_users()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
