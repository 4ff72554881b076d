"""What a machine can do for a workload: memory, latency, throughput, goodput and cost."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ridgeline.core.plan import ModelRole
from ridgeline.planning.cost import token_prices, usd_per_million_tokens, usd_per_thousand_requests
from ridgeline.planning.load import Skipped, run, run_alone, run_traffic
from ridgeline.planning.notes import notes_of
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, replica_choices
from ridgeline.planning.simulation import ScaledPredictor
from ridgeline.planning.traffic import Traffic
from ridgeline.roofline import decode_batch, prefill_batch
from ridgeline.roofline.calibration import Spread
from ridgeline.roofline.history import past_errors
from ridgeline.roofline.memory import kv_bytes_per_token, weights_bytes
from ridgeline.roofline.predict import StepPredictor

ATTAINMENT = 0.9  # share of requests that must meet every SLO


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """The answer. Tokens/s and dollars are of the whole machine under the load; ``alone_*`` are a
    single request's on an idle machine. ``traffic`` is ``None`` if the model does not fit."""

    question: Question
    replica: Replica
    traffic: Traffic | None = None
    low: Traffic | None = None
    high: Traffic | None = None
    alone_ttft_s: float = 0.0
    alone_tpot_s: float = 0.0
    prefill_bound: str = ""
    decode_bound: str = ""

    @property
    def fits(self) -> bool:
        return self.traffic is not None

    @property
    def output_tok_s(self) -> float:
        return self.traffic.output_tok_s * self.replica.count if self.traffic else 0.0

    @property
    def goodput_rps(self) -> float:
        if self.traffic is None:
            return 0.0
        return self.traffic.goodput_rps(self.question.slo) * self.replica.count

    @property
    def keeps_up(self) -> bool:
        """Whether answers come as fast as requests; at saturation there is no such question."""
        traffic = self.traffic
        if traffic is None or self.question.is_saturating:
            return traffic is not None
        return (traffic.steady() if self.question.trace else traffic).keeps_up

    @property
    def power_w(self) -> float | None:
        """What the devices draw at most, by their datasheet."""
        machine = self.question.machine
        return None if machine.power_w is None else machine.power_w * machine.count

    @property
    def notes(self) -> list[str]:
        """What must be known to read the plan right: sentences."""
        return notes_of(self.question, self.replica, self.traffic)

    @property
    def usd_per_hour(self) -> float | None:
        machine = self.question.machine
        return None if machine.usd_per_hour is None else machine.usd_per_hour * machine.count

    def to_json(self) -> dict[str, Any]:
        """Plain values; what cannot be known is null."""
        question, traffic, usd = self.question, self.traffic, self.usd_per_hour
        machine, memory = question.machine, self.replica.fit
        result: dict[str, Any] = {
            "model": question.model.spec.model_type,
            "hardware": machine.name,
            "count": machine.count,
            "tensor_parallel": self.replica.model.layout.tensor,
            "replicas": self.replica.count,
            "load": question.load,
            "measured": machine.measured,
            "kind": machine.kind.value,
            "notes": self.notes,
            "power_w": self.power_w,
            "fits": self.fits,
            "sequence_tokens": question.longest,
            "weights_format": question.model.main_format.name,
            "weights_bytes": int(weights_bytes(question.model)),
            "kv_bytes_per_token": kv_bytes_per_token(question.model),
            "activation_bytes": memory.activation_bytes,
            "kv_pool_bytes": memory.kv_pool_bytes,
            "max_batch": memory.max_batch * self.replica.count,
            "max_context": memory.max_context,
        }
        if traffic is None or self.low is None or self.high is None:
            return result | dict.fromkeys(_UNKNOWN)
        goodput, tokens = self.goodput_rps, self.output_tok_s
        return result | {
            **self._latencies(traffic, self.low, self.high),
            "output_tok_s": tokens,
            "input_tok_s": traffic.input_tok_s * self.replica.count,
            "completed_rps": traffic.completed_rps * self.replica.count,
            "keeps_up": self.keeps_up,
            "goodput_rps": goodput,
            "slo": asdict(question.slo),
            "slo_attainment": traffic.attainment(question.slo),
            "usd_per_hour": usd,
            "usd_per_1m_output": (
                usd_per_million_tokens(usd, tokens) if usd is not None and tokens else None
            ),
            "usd_per_1k_requests": (
                usd_per_thousand_requests(usd, goodput) if usd is not None and goodput else None
            ),
            "usd_per_1m_by_phase": self._token_prices(),
            "joules_per_output_token_at_most": (
                self.power_w / tokens if self.power_w is not None and tokens else None
            ),
            "bound": {"prefill": self.prefill_bound, "decode": self.decode_bound},
            "past_error": _past_error(self.question),
            "past_runs": _past_runs(self.question),
        }

    def _latencies(self, traffic: Traffic, low: Traffic, high: Traffic) -> dict[str, Any]:
        """Those under the load; at saturation, where TTFT is a queue's length, a lone request's.

        Requests of one token have no TPOT.
        """
        ttft_s, tpot_s = traffic.mean_ttft_s, traffic.mean_tpot_s
        ttfts, tpots = (
            [low.mean_ttft_s, high.mean_ttft_s],
            [low.mean_tpot_s, high.mean_tpot_s],
        )
        if self.question.is_saturating:
            prefill, decode = _spreads(self.question)
            ttft_s, tpot_s = self.alone_ttft_s, self.alone_tpot_s
            ttfts = [ttft_s * prefill.low, ttft_s * prefill.high]
            tpots = [tpot_s * decode.low, tpot_s * decode.high]
        count = self.replica.count
        return {
            "ttft_s": ttft_s,
            "tpot_s": tpot_s or None,
            "alone_ttft_s": self.alone_ttft_s,
            "alone_tpot_s": self.alone_tpot_s or None,
            "loaded_tpot_s": traffic.mean_tpot_s or None,
            "percentiles": {} if self.question.is_saturating else traffic.latency_percentiles(),
            "interval_80": {
                "ttft_s": ttfts,
                "tpot_s": tpots if tpot_s else None,
                "output_tok_s": [high.output_tok_s * count, low.output_tok_s * count],
            },
        }

    def _token_prices(self) -> dict[str, float] | None:
        """Input and output apart: the machine's time is split as its steps' seconds are."""
        traffic, count = self.traffic, self.replica.count
        if self.usd_per_hour is None or traffic is None or not traffic.completed:
            return None
        share = traffic.prefill_s / (traffic.prefill_s + traffic.decode_s)
        prices = token_prices(
            self.usd_per_hour,
            prefill_s=share,
            decode_s=1.0 - share,
            input_tokens=traffic.input_tok_s * count,
            output_tokens=traffic.output_tok_s * count,
        )
        return {"input": prices.input, "output": prices.output}


_UNKNOWN = (
    "ttft_s", "tpot_s", "alone_ttft_s", "alone_tpot_s", "loaded_tpot_s", "percentiles",
    "output_tok_s", "input_tok_s", "completed_rps", "goodput_rps", "slo", "slo_attainment",
    "usd_per_hour", "keeps_up", "usd_per_1m_output", "usd_per_1k_requests", "usd_per_1m_by_phase",
    "bound", "joules_per_output_token_at_most", "interval_80", "past_error",
    "past_runs",
)  # fmt: skip


def answer(question: Question) -> CapacityPlan:
    """Fit, predict and simulate.

    With SLOs, and no number of devices for a replica asked for, the plan is the first of
    `replica_choices` that holds the load, or else the one of the highest goodput; those that would
    take too long to simulate are left out, and a note says so.

    Raises:
        InvalidRequestError: the load or the layout contradicts the model or the machine.
        TooLongError: each of them would take too long.
    """
    choices, found = replica_choices(question), list[tuple[Replica, Traffic]]()
    if len(choices) == 1:
        return plan_of(question, choices[0])
    skipped = Skipped()
    for replica in choices:
        with skipped.at(replica.text):
            traffic = run_traffic(question, replica, predictor_of(question, replica))
            found.append((replica, traffic))
            if not question.is_saturating and holds(traffic, question):
                return plan_of(question, replica, traffic)
    if not found:
        skipped.raise_if_any()
    best = max(found, key=lambda each: each[1].goodput_rps(question.slo) * each[0].count)
    return plan_of(replace(question, notes=(*question.notes, *skipped.notes)), *best)


def holds(traffic: Traffic, question: Question) -> bool:
    """Whether a load is kept up with, and its requests meet the SLOs nine times of ten."""
    steady = traffic.steady() if question.trace else traffic
    return steady.keeps_up and traffic.attainment(question.slo) >= ATTAINMENT


def predictor_of(question: Question, replica: Replica) -> StepPredictor:
    """What predicts the steps of a replica."""
    return StepPredictor({ModelRole.TARGET: replica.model}, question.machine.calibration)


def plan_of(question: Question, replica: Replica, traffic: Traffic | None = None) -> CapacityPlan:
    """The plan of one way to spread the model, simulated unless the ``traffic`` of `run_traffic` is
    known; its question asks for that way."""
    question = replace(question, tensor=replica.model.layout.tensor)
    if not replica.fit.fits:
        return CapacityPlan(question=question, replica=replica)
    typical = question.typical
    predictor = predictor_of(question, replica)
    prefill, decode = _spreads(question)
    if traffic is None:
        traffic = run_traffic(question, replica, predictor)
    arrivals = [each.arrival for each in traffic.answers]
    slower = traffic.slower

    def scaled(prefill_factor: float, decode_factor: float) -> Traffic:
        if question.is_saturating and prefill_factor == decode_factor:
            return slower(decode_factor)
        scaled = ScaledPredictor(predictor=predictor, prefill=prefill_factor, decode=decode_factor)
        return run(question, replica, arrivals, scaled)

    context = typical.prompt_tokens + typical.output_tokens // 2
    chunk = min(typical.prompt_tokens, question.config.max_num_batched_tokens)
    in_progress = traffic.completed_rps * typical.output_tokens * traffic.mean_tpot_s
    typical_batch = max(1, round(min(in_progress, replica.fit.max_batch)))
    alone = run_alone(question, replica, predictor)
    return CapacityPlan(
        question=question,
        replica=replica,
        traffic=traffic,
        low=scaled(prefill.low, decode.low),
        high=scaled(prefill.high, decode.high),
        alone_ttft_s=alone.mean_ttft_s,
        alone_tpot_s=alone.mean_tpot_s,
        prefill_bound=predictor.bound(prefill_batch(chunk)),
        decode_bound=predictor.bound(decode_batch(typical_batch, context)),
    )


def _spreads(question: Question) -> tuple[Spread, Spread]:
    """Those of prefill and of decode, for a model in that format."""
    calibration, form = question.machine.calibration, question.model.main_format
    return calibration.spread("prefill", form), calibration.spread("decode", form)


def _past_runs(question: Question) -> dict[str, Any]:
    """By phase, how far off predictions for models in this format were in past runs here."""
    if not question.machine.measured:
        return {}
    executor, form = question.machine.calibration.executor, question.model.main_format
    return {each.phase: asdict(each) for each in past_errors(executor, {form.name})}


def _past_error(question: Question) -> dict[str, Any]:
    """How far off the calibration was on steps that it had not seen."""
    return {
        phase: {
            "median": spread.median_error if spread.count else None,
            "p90": spread.p90_error if spread.count else None,
            "count": spread.count,
        }
        for phase, spread in zip(("prefill", "decode"), _spreads(question), strict=True)
    }
