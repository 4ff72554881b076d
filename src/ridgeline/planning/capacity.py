"""What a machine can do for a workload: memory, latency, throughput, goodput and cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import StepPrice
from ridgeline.planning.machine import Machine
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, choose_replica
from ridgeline.planning.simulation import ScaledPrice, simulate
from ridgeline.planning.traffic import Traffic
from ridgeline.planning.workload import Arrival, paced, poisson
from ridgeline.roofline import decode_batch, prefill_batch
from ridgeline.roofline.cost import token_prices, usd_per_million_tokens, usd_per_thousand_requests
from ridgeline.roofline.memory import kv_bytes_per_token, weights_bytes
from ridgeline.roofline.predict import StepPredictor

_RESIDENCES = 6  # times that a request stays, for which requests arrive
_MORE = 1.25  # times the requests that were simulated: with so many, they are again


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
            "fits": self.fits,
            "weights_format": question.model.main_format.name,
            "weights_bytes": int(weights_bytes(question.model)),
            "kv_bytes_per_token": kv_bytes_per_token(question.model),
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
            "slo": {"ttft_s": question.slo.ttft_s, "tpot_s": question.slo.tpot_s},
            "slo_attainment": traffic.attainment(question.slo),
            "usd_per_hour": usd,
            "usd_per_1m_output": (
                usd_per_million_tokens(usd, tokens) if usd is not None and tokens else None
            ),
            "usd_per_1k_requests": (
                usd_per_thousand_requests(usd, goodput) if usd is not None and goodput else None
            ),
            "usd_per_1m_by_phase": self._token_prices(),
            "bound": {"prefill": self.prefill_bound, "decode": self.decode_bound},
            "past_error": _past_error(machine),
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
            spreads = self.question.machine.calibration.spreads
            prefill, decode = spreads["prefill"], spreads["decode"]
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
    "ttft_s", "tpot_s", "alone_ttft_s", "alone_tpot_s", "loaded_tpot_s", "output_tok_s",
    "input_tok_s", "completed_rps", "goodput_rps", "slo", "slo_attainment", "usd_per_hour",
    "keeps_up", "usd_per_1m_output", "usd_per_1k_requests", "usd_per_1m_by_phase", "bound",
    "interval_80", "past_error",
)  # fmt: skip


def answer(question: Question, traffic: Traffic | None = None) -> CapacityPlan:
    """Fit, predict and simulate, unless the ``traffic`` of `run_traffic` is known.

    Raises:
        InvalidRequestError: the load or the layout contradicts the model or the machine.
    """
    replica = choose_replica(question)
    if not replica.fit.fits:
        return CapacityPlan(question=question, replica=replica)
    machine, typical = question.machine, question.typical
    predictor = StepPredictor({ModelRole.TARGET: replica.model}, machine.calibration)
    prefill, decode = (machine.calibration.spreads[phase] for phase in ("prefill", "decode"))
    if traffic is None:
        traffic = run_traffic(question, replica, predictor)
    arrivals = [each.arrival for each in traffic.answers]
    slower = traffic.slower

    def scaled(prefill_factor: float, decode_factor: float) -> Traffic:
        if question.is_saturating and prefill_factor == decode_factor:
            return slower(decode_factor)
        price = ScaledPrice(price=predictor, prefill=prefill_factor, decode=decode_factor)
        return _run(question, replica, arrivals, price)

    context = typical.prompt_tokens + typical.output_tokens // 2
    chunk = min(typical.prompt_tokens, question.config.max_num_batched_tokens)
    in_progress = traffic.completed_rps * typical.output_tokens * traffic.mean_tpot_s
    typical_batch = max(1, round(min(in_progress, replica.fit.max_batch)))
    alone = _run(question, replica, [typical], predictor)
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


def run_traffic(question: Question, replica: Replica, price: StepPrice) -> Traffic:
    """One replica under its part of the load; of Poisson arrivals, its steady state."""
    if question.rate_rps is None or question.trace:
        return _run(question, replica, _part(question, replica), price)
    alone = _run(question, replica, [question.typical], price)
    first = _arrivals(question, replica, alone.mean_end_to_end_s)
    traffic = _run(question, replica, first, price)
    again = _arrivals(question, replica, traffic.mean_end_to_end_s)  # they stay longer under load
    return traffic if len(again) <= _MORE * len(first) else _run(question, replica, again, price)


def _arrivals(question: Question, replica: Replica, residence_s: float) -> Sequence[Arrival]:
    """One replica's part of Poisson arrivals, where requests stay for so many seconds."""
    assert question.rate_rps is not None
    rate_rps = question.rate_rps / replica.count
    in_progress = min(rate_rps * residence_s, num_at_once(question, replica))
    arrivals = poisson(
        rate_rps=rate_rps,
        num_requests=max(question.num_requests, ceil(_RESIDENCES * in_progress)),
        prompt_tokens=question.prompt_tokens,
        output_tokens=question.output_tokens,
        seed=question.seed,
    )
    return paced(arrivals, rate_rps)


def num_at_once(question: Question, replica: Replica) -> int:
    """Requests of the load that a replica runs at once, at the most."""
    return min(replica.fit.max_batch, question.config.max_num_seqs)


def _part(question: Question, replica: Replica) -> Sequence[Arrival]:
    """One replica's part of a trace, or what saturates it."""
    if question.trace:
        return question.trace[:: replica.count]
    return [question.typical] * (2 * num_at_once(question, replica))


def _run(
    question: Question, replica: Replica, arrivals: Sequence[Arrival], price: StepPrice
) -> Traffic:
    """Sequences of a trace differ, and are admitted as long as there are blocks."""
    at_once = question.config.max_num_seqs if question.trace else num_at_once(question, replica)
    config = replace(question.config, max_num_seqs=at_once, max_model_len=question.longest)
    traffic = simulate(
        replica.model,
        question.machine.calibration,
        arrivals,
        config,
        kv_pool_bytes=replica.kv_pool_bytes,
        price=price,
    )
    is_poisson = question.load == "poisson" and len(arrivals) > 1
    return traffic.steady() if is_poisson else traffic


def _past_error(machine: Machine) -> dict[str, Any]:
    """How far off earlier predictions on this machine were."""
    return {
        phase: {
            "median": spread.median_error if spread.count else None,
            "p90": spread.p90_error if spread.count else None,
            "count": spread.count,
        }
        for phase, spread in machine.calibration.spreads.items()
    }
