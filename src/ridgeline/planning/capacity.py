"""What a machine can do for a workload: memory, latency, throughput, goodput and cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import StepPrice
from ridgeline.planning.machine import Machine
from ridgeline.planning.simulation import ScaledPrice, Traffic, simulate
from ridgeline.planning.workload import Arrival, Slo, poisson
from ridgeline.roofline import PricedModel, decode_batch, prefill_batch
from ridgeline.roofline.cost import token_prices, usd_per_million_tokens, usd_per_thousand_requests
from ridgeline.roofline.memory import MemoryFit, fit, kv_bytes_per_token, weights_bytes
from ridgeline.roofline.predict import StepPredictor

_MAX_SEQS = 256
_MIN_REQUESTS = 40
_ROOMY = 16  # sequences that a replica should hold before it is spread over more devices


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine and a load.

    ``rate_rps`` ``None`` asks for saturation: as many requests at once as fit. ``trace`` takes the
    place of Poisson arrivals of ``prompt_tokens`` and ``output_tokens``.
    """

    model: PricedModel
    machine: Machine
    prompt_tokens: int
    output_tokens: int
    rate_rps: float | None = None
    slo: Slo = field(default_factory=Slo)
    tensor: int | None = None
    trace: Sequence[Arrival] = ()
    num_requests: int = 80
    seed: int = 0
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=_MAX_SEQS))

    @property
    def is_saturating(self) -> bool:
        return self.rate_rps is None and not self.trace

    @property
    def load(self) -> str:
        """Where requests come from: a trace, poisson arrivals, or all at once: saturation."""
        return "trace" if self.trace else "saturation" if self.rate_rps is None else "poisson"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        lengths = [each.prompt_tokens + each.output_tokens for each in self.trace]
        return max(lengths, default=self.prompt_tokens + self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One copy of the model, spread over some devices of the machine."""

    model: PricedModel
    fit: MemoryFit
    count: int


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
            "completed_rps": len(traffic.answers) / traffic.seconds * self.replica.count,
            "goodput_rps": goodput,
            "slo": {"ttft_s": question.slo.ttft_s, "tpot_s": question.slo.tpot_s},
            "slo_attainment": traffic.attainment(question.slo),
            "usd_per_hour": usd,
            "usd_per_1m_output": None if usd is None else usd_per_million_tokens(usd, tokens),
            "usd_per_1k_requests": (
                usd_per_thousand_requests(usd, goodput) if usd is not None and goodput else None
            ),
            "usd_per_1m_by_phase": self._token_prices(),
            "bound": {"prefill": self.prefill_bound, "decode": self.decode_bound},
            "past_error": _past_error(machine),
        }

    def _latencies(self, traffic: Traffic, low: Traffic, high: Traffic) -> dict[str, Any]:
        """Those under the load; at saturation, where TTFT is a queue's length, a lone request's."""
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
            "tpot_s": tpot_s,
            "alone_ttft_s": self.alone_ttft_s,
            "alone_tpot_s": self.alone_tpot_s,
            "loaded_tpot_s": traffic.mean_tpot_s,
            "interval_80": {
                "ttft_s": ttfts,
                "tpot_s": tpots,
                "output_tok_s": [high.output_tok_s * count, low.output_tok_s * count],
            },
        }

    def _token_prices(self) -> dict[str, float] | None:
        """Input and output apart: each second of the machine is split by a request's phases."""
        question = self.question
        if self.usd_per_hour is None or self.traffic is None:
            return None
        prefill_s = self.alone_ttft_s
        decode_s = question.output_tokens * self.traffic.mean_tpot_s / self._concurrency()
        share = prefill_s / (prefill_s + decode_s)
        prices = token_prices(
            self.usd_per_hour,
            prefill_s=share,
            decode_s=1.0 - share,
            input_tokens=self.traffic.input_tok_s * self.replica.count,
            output_tokens=self.output_tok_s,
        )
        return {"input": prices.input, "output": prices.output}

    def _concurrency(self) -> float:
        """Requests that decode at once, by Little's law."""
        assert self.traffic is not None
        rate = len(self.traffic.answers) / self.traffic.seconds
        return max(1.0, rate * self.question.output_tokens * self.traffic.mean_tpot_s)


_UNKNOWN = (
    "ttft_s", "tpot_s", "alone_ttft_s", "alone_tpot_s", "loaded_tpot_s", "output_tok_s",
    "input_tok_s", "completed_rps", "goodput_rps", "slo", "slo_attainment", "usd_per_hour",
    "usd_per_1m_output", "usd_per_1k_requests", "usd_per_1m_by_phase", "bound", "interval_80",
    "past_error",
)  # fmt: skip


def answer(question: Question) -> CapacityPlan:
    """Fit, predict and simulate.

    Raises:
        InvalidRequestError: the load or the layout contradicts the model or the machine.
    """
    replica = choose_replica(question)
    if not replica.fit.fits:
        return CapacityPlan(question=question, replica=replica)
    machine = question.machine
    predictor = StepPredictor({ModelRole.TARGET: replica.model}, machine.calibration)
    prefill, decode = (machine.calibration.spreads[phase] for phase in ("prefill", "decode"))
    traffic = run_traffic(question, replica, predictor)

    def scaled(prefill_factor: float, decode_factor: float) -> Traffic:
        if question.is_saturating and prefill_factor == decode_factor:
            return traffic.slower(decode_factor)
        price = ScaledPrice(price=predictor, prefill=prefill_factor, decode=decode_factor)
        return run_traffic(question, replica, price)

    context = question.prompt_tokens + question.output_tokens // 2
    chunk = min(question.prompt_tokens, question.config.max_num_batched_tokens)
    host_s = machine.calibration.host_step_s + machine.calibration.host_segment_s
    typical_batch = max(1, round(min(_decoding(question, traffic), replica.fit.max_batch)))
    return CapacityPlan(
        question=question,
        replica=replica,
        traffic=traffic,
        low=scaled(prefill.low, decode.low),
        high=scaled(prefill.high, decode.high),
        alone_ttft_s=_prefill_s(predictor, question.prompt_tokens, chunk) + host_s,
        alone_tpot_s=predictor.batch_seconds(decode_batch(1, context)) + host_s,
        prefill_bound=predictor.bound(prefill_batch(chunk)),
        decode_bound=predictor.bound(decode_batch(typical_batch, context)),
    )


def _check(question: Question) -> None:
    limit = question.model.spec.max_position
    if question.longest > limit:
        raise InvalidRequestError(
            f"Prompt and output are {question.longest} tokens together, and the model's context "
            f"is {limit}."
        )
    count, tensor = question.machine.count, question.tensor
    if tensor is not None and (tensor < 1 or count % tensor):
        raise InvalidRequestError(f"{tensor} tensor-parallel ranks do not divide {count} devices.")


def choose_replica(question: Question) -> Replica:
    """Spread over the asked number of devices, or over the fewest that hold 16 sequences.

    Raises:
        InvalidRequestError: the load or the layout contradicts the model or the machine.
    """
    _check(question)
    machine = question.machine
    choices = [n for n in range(1, machine.count + 1) if machine.count % n == 0]
    found = None
    for tensor in [question.tensor] if question.tensor else choices:
        model = replace(question.model, layout=ParallelLayout(tensor=tensor))
        memory = fit(
            model,
            memory_bytes=machine.memory_bytes,
            context=question.longest,
            step_tokens=question.config.max_num_batched_tokens,
            block_tokens=question.config.block_tokens,
        )
        found = Replica(model=model, fit=memory, count=machine.count // tensor)
        if memory.max_batch >= _ROOMY:
            break
    assert found is not None
    if found.model.layout.tensor > 1 and not machine.calibration.ceilings.link_bytes_per_s:
        raise InvalidRequestError(
            f"How fast {machine.name} devices exchange data is not known; use -tp 1."
        )
    return found


def run_traffic(question: Question, replica: Replica, price: StepPrice) -> Traffic:
    """One replica under its part of the load."""
    arrivals = _arrivals(question, replica)
    config = replace(
        question.config,
        max_num_seqs=min(question.config.max_num_seqs, replica.fit.max_batch),
        max_model_len=question.longest,
    )
    pool = replica.fit.kv_pool_bytes * replica.model.layout.tensor
    calibration = question.machine.calibration
    return simulate(replica.model, calibration, arrivals, config, kv_pool_bytes=pool, price=price)


def _arrivals(question: Question, replica: Replica) -> Sequence[Arrival]:
    """One replica's part of the load."""
    if question.trace:
        return question.trace[:: replica.count]
    if question.rate_rps is not None:
        return poisson(
            rate_rps=question.rate_rps / replica.count,
            num_requests=max(_MIN_REQUESTS, question.num_requests),
            prompt_tokens=question.prompt_tokens,
            output_tokens=question.output_tokens,
            seed=question.seed,
        )
    at_once = min(replica.fit.max_batch, question.config.max_num_seqs)
    one = Arrival(
        arrival_s=0.0,
        prompt_tokens=question.prompt_tokens,
        output_tokens=question.output_tokens,
    )
    return [one] * (2 * at_once)


def _prefill_s(predictor: StepPredictor, prompt_tokens: int, chunk: int) -> float:
    """Seconds until the first token of a request that is alone."""
    starts = range(0, prompt_tokens, chunk)
    return sum(
        predictor.batch_seconds(prefill_batch(min(chunk, prompt_tokens - start), start=start))
        for start in starts
    )


def _decoding(question: Question, traffic: Traffic) -> float:
    rate = len(traffic.answers) / traffic.seconds
    return rate * question.output_tokens * traffic.mean_tpot_s


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
