"""Time to first token under load: the simulation against the real engine, on the same trace."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.honesty.measured import TrafficTimes
from ridgeline.bench.calibration import BenchModel
from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.plan import ModelRole
from ridgeline.core.request import Request
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.loop import EngineLoop
from ridgeline.planning.simulation import ScaledPredictor, simulate
from ridgeline.planning.workload import Arrival, poisson
from ridgeline.roofline import PricedModel, decode_batch, prefill_batch
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor
from ridgeline.scheduler import Scheduler, SchedulerConfig

_POOL_BYTES = 512 << 20
_CONFIG = EngineConfig(max_num_seqs=8, max_model_len=512, kv_cache_memory_bytes=_POOL_BYTES)
_PROMPT, _OUTPUT = 96, 12


def make_trace(
    model: PricedModel, calibration: Calibration, *, load: float, num_requests: int
) -> list[Arrival]:
    """Poisson arrivals that keep the engine busy for a share ``load`` of the time, one by one."""
    predictor = StepPredictor({ModelRole.TARGET: model}, calibration)
    alone = predictor.batch_seconds(prefill_batch(_PROMPT))
    alone += (_OUTPUT - 1) * predictor.batch_seconds(decode_batch(1, _PROMPT))
    return poisson(
        rate_rps=load / alone,
        num_requests=num_requests,
        prompt_tokens=_PROMPT,
        output_tokens=_OUTPUT,
        spread=0.5,
        seed=11,
    )


def predicted_ttft_s(
    model: PricedModel,
    calibration: Calibration,
    trace: Sequence[Arrival],
    drift: Mapping[str, float] | None = None,
) -> float:
    """Mean of the simulation, on a machine that takes ``drift`` times the seconds of a phase."""
    drift = drift or {}
    scaled = ScaledPredictor(
        predictor=StepPredictor({ModelRole.TARGET: model}, calibration),
        prefill=drift.get("prefill", 1.0),
        decode=drift.get("decode", 1.0),
    )
    traffic = simulate(
        model, calibration, trace, _CONFIG, kv_pool_bytes=_POOL_BYTES, predictor=scaled
    )
    return traffic.mean_ttft_s


def measured_ttfts_s(
    model: BenchModel, calibration: Calibration, trace: Sequence[Arrival]
) -> tuple[float, ...]:
    """Of the real engine, in real time; in the order in which requests finished.

    Its scheduler goes by the calibrated price, as an engine's and the simulation's do.
    """
    layout = model.executor.kv_layout()
    resolved = resolve(
        _CONFIG,
        spec=model.executor.spec(),
        executor=model.executor.name,
        dtype="",
        block_bytes=layout.block_bytes,
        free_bytes=0,
    )
    model.executor.allocate_kv(resolved.num_blocks)
    windows = tuple(group.window for group in layout.groups)
    scheduler = Scheduler(
        SchedulerConfig.of_engine(_CONFIG, resolved, windows=windows),
        predictor=StepPredictor({ModelRole.TARGET: model.priced}, calibration),
    )
    loop = EngineLoop(model.executor, scheduler, None)
    waiting = sorted(trace, key=lambda arrival: arrival.arrival_s, reverse=True)
    start, ttfts = time.monotonic(), list[float]()
    while waiting or loop.has_work:
        now = time.monotonic() - start
        while waiting and waiting[-1].arrival_s <= now:
            loop.add(_request(len(waiting), waiting.pop(), start))
        if not loop.has_work and waiting:
            time.sleep(max(0.0, waiting[-1].arrival_s - (time.monotonic() - start)))
        for chunk in loop.step():
            if chunk.timings is not None and chunk.timings.ttft_s is not None:
                ttfts.append(chunk.timings.ttft_s)
    return tuple(ttfts)


def _request(request_id: int, arrival: Arrival, start_s: float) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(1,) * arrival.prompt_tokens,
        params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, temperature=0.0),
        seed=request_id,
        arrival_s=start_s + arrival.arrival_s,
    )


def ttft_entry(
    times: TrafficTimes, predicted_s: float, corrected_s: float | None = None
) -> dict[str, Any]:
    """A row of the report; the bar is 20 %. ``corrected_s``: predicted at the machine's speed of
    that minute."""
    measured_s = times.mean_ttft_s
    error = abs(predicted_s / measured_s - 1.0)
    corrected = None if corrected_s is None else abs(corrected_s / measured_s - 1.0)
    return {
        "load": times.load,
        "requests": len(times.arrivals),
        "visits_s": [sum(visit) / len(visit) for visit in times.visits_s],
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": error,
        "held": error <= 0.2,
        "corrected_s": corrected_s,
        "corrected_error": corrected,
    }
