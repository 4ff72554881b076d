"""`ridgeline fleet verify` and `replay`: whether engines give the same tokens, now and again."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.core.errors import NetworkError
from ridgeline.fleet.policies import ByPredictedSeconds
from ridgeline.fleet.request_log import LoggedRequest, read_answer
from ridgeline.fleet.simulation import SimulatedMachine, simulate_fleet
from ridgeline.planning.traffic import Traffic
from ridgeline.planning.workload import Arrival
from ridgeline.scheduler import SchedulerConfig
from ridgeline.scheduler.prediction import DEFAULT_CURVE, CurvePredictor, LinearPredictor, StepCurve

_TEXT = "The history of the sea is long. Once upon a time"
_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.8, "seed": 8, "frequency_penalty": 0.5, "top_p": 0.9},
    "two outputs": {"temperature": 1.0, "seed": 9, "n": 2},
}
_NUM_TOKENS = 24
_BLOCK_TOKENS, _STEP_TOKENS = 16, 2048


class EngineTold(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as ``/fleet/state`` of a router has it."""

    name: str
    url: str
    up: bool
    reason: str = ""
    pending: int = 0
    running: int = 0
    kv_usage: float | None = None
    hit_rate: float | None = None
    busy: float | None = None
    mbu: float | None = None
    max_seqs: int = 256
    kv_tokens: int = 1 << 17
    curve: StepCurve | None = None
    linear: LinearPredictor | None = msgspec.field(default=None, name="price")


class FleetTold(msgspec.Struct, frozen=True, kw_only=True):
    """``/fleet/state`` of a router; ``cascade`` are engines of the small model."""

    engines: tuple[EngineTold, ...]
    cascade: tuple[EngineTold, ...] = ()
    starting: int = 0
    autoscaler: dict[str, Any] | None = None


async def fleet_state(target: HttpTarget) -> FleetTold:
    """
    Raises:
        NetworkError: it does not answer, or is no router.
    """
    answer = await target.get("/fleet/state")
    try:
        return msgspec.json.decode(answer, type=FleetTold)
    except msgspec.DecodeError as error:
        raise NetworkError(f"This is no router of Ridgeline's: {error}") from None


async def verify(router: HttpTarget, engines: Sequence[HttpTarget]) -> dict[str, list[str | None]]:
    """Digests of the tokens, texts and log-probabilities of some fixed requests: by request those
    of each engine, and last the router's; ``None`` where there was no answer."""
    model = await router.first_model()
    targets = [each.with_model(model) for each in (*engines, router)]
    found = {}
    for name, fields in _REQUESTS.items():
        body = fields | {
            "prompt": _TEXT, "max_tokens": _NUM_TOKENS, "ignore_eos": True,
            "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        answers = [_digest(each, body) for each in targets]
        found[name] = await asyncio.gather(*answers)
    return found


async def _digest(target: HttpTarget, body: dict[str, Any]) -> str | None:
    try:
        answer = read_answer(await target.ask("/v1/completions", body))
    except NetworkError:
        return None
    return None if answer is None else answer.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A request of a log, asked again. ``is_same``: its answer; ``None`` where there is nothing to
    compare, or no answer."""

    logged: LoggedRequest
    seconds: float | None
    ttft_s: float | None
    is_same: bool | None


async def replay(
    target: HttpTarget, requests: Sequence[LoggedRequest], *, speed: float = 1.0
) -> list[Replayed]:
    """Ask all those that have their text again, each at its time; ``speed`` times as fast."""
    begin_s, first_s = time.monotonic(), requests[0].at_s

    async def one(logged: LoggedRequest) -> Replayed:
        at_s = (logged.at_s - first_s) / speed
        await asyncio.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        sent_s, ttft_s, parts = time.monotonic(), None, []
        try:
            async for part in target.parts("POST", logged.path, msgspec.json.encode(logged.again)):
                if ttft_s is None and logged.ttft_s is not None:
                    ttft_s = time.monotonic() - sent_s
                parts.append(part)
        except NetworkError:
            return Replayed(logged=logged, seconds=None, ttft_s=None, is_same=None)
        answer = read_answer(b"".join(parts))
        digest = None if answer is None else answer.digest
        is_same = digest == logged.digest if logged.is_repeatable else None
        seconds = time.monotonic() - sent_s
        return Replayed(logged=logged, seconds=seconds, ttft_s=ttft_s, is_same=is_same)

    return await asyncio.gather(*(one(each) for each in requests if each.body is not None))


def predicted(
    state: FleetTold, requests: Sequence[LoggedRequest], *, speed: float = 1.0
) -> Traffic | None:
    """What the engines of a fleet make of a log by their own predictions, simulated; ``None`` where
    they have none in seconds, as no calibration was made."""
    told = next((each for each in state.engines if each.up), None)
    if told is None or told.curve in (None, DEFAULT_CURVE) or told.linear is None:
        return None
    first_s, longest = requests[0].at_s, max(r.prompt_tokens + r.output_tokens for r in requests)
    blocks = max(told.kv_tokens, 2 * longest) // _BLOCK_TOKENS + 2
    settings = SchedulerConfig(
        max_num_seqs=told.max_seqs,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=longest + 1,
        num_blocks=(blocks,),
        windows=(None,),
        block_tokens=_BLOCK_TOKENS,
    )
    machine = SimulatedMachine(
        settings=settings,
        predictor=CurvePredictor(curve=told.curve, pair_s=told.linear.pair_s),
        linear=told.linear,
        curve=told.curve,
    )
    arrivals = [
        Arrival(
            arrival_s=(each.at_s - first_s) / speed,
            prompt_tokens=each.prompt_tokens,
            output_tokens=each.output_tokens,
        )
        for each in requests
    ]
    count = sum(each.up for each in state.engines)
    return simulate_fleet(machine, arrivals, ByPredictedSeconds(), count=count).traffic
