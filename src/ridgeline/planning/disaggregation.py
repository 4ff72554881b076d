"""Prefill and decode on instances of their own: how many of each."""

from dataclasses import dataclass, replace
from math import ceil

from ridgeline.core.errors import InvalidRequestError
from ridgeline.planning.capacity import predictor_of
from ridgeline.planning.load import num_at_once
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, choose_replica
from ridgeline.planning.search import highest_rate
from ridgeline.roofline import decode_batch
from ridgeline.roofline.memory import kv_bytes
from ridgeline.roofline.slo import Slo

_MOST = 8  # instances of a ratio


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Requests/s that one instance prefills within the TTFT, and decodes within the TPOT.

    ``transfer_bytes`` of K and V go from one to the other for each prompt, in ``transfer_s`` where
    the devices' link is known.
    """

    replica: Replica
    prefill_rps: float
    decode_rps: float
    decode_batch: int
    transfer_bytes: float
    transfer_s: float | None

    def instances(self, rate_rps: float) -> tuple[int, int]:
        """⌈λ/μ⌉ of each role, for a load."""
        return instances(rate_rps, self.prefill_rps), instances(rate_rps, self.decode_rps)

    @property
    def ratio(self) -> tuple[int, int]:
        """The prefill : decode, of up to eight instances, that answers most for each of them."""
        return best_ratio(self.prefill_rps, self.decode_rps)


def disaggregate(question: Question) -> Disaggregation:
    """What an instance of each role answers.

    Prefill is simulated, of prompts with one token of output and their own TTFT less the transfer.
    Decode is the largest batch that fits and whose steps keep the TPOT.

    Raises:
        InvalidRequestError: there are no two limits, the model does not fit, or a lone request
            misses one.
    """
    slo = question.slo
    if slo.ttft_s is None or slo.tpot_s is None:
        raise InvalidRequestError("--disaggregate needs both limits: --slo ttft=…,tpot=….")
    replica = choose_replica(question)
    if not replica.fit.fits:
        raise InvalidRequestError("The model does not fit: give more devices.")
    question = replace(question, tensor=replica.model.layout.tensor)
    machine = replace(question.machine, count=replica.model.layout.tensor)
    transfer = kv_bytes(question.model, question.prompt_tokens)
    link = machine.calibration.ceilings.link_bytes_per_s
    transfer_s = transfer / link / replica.model.layout.tensor if link else None
    ttft_s = slo.ttft_s - (transfer_s or 0.0)
    prompts = replace(
        question, machine=machine, output_tokens=1, rate_rps=None, slo=Slo(ttft_s=max(ttft_s, 1e-9))
    )
    prefill = highest_rate(prompts)
    if prefill is None:
        raise InvalidRequestError("No prefill meets the TTFT: a lone prompt misses it.")
    batch, decode_rps = _decode(question, replica, slo.tpot_s)
    return Disaggregation(
        replica=replica,
        prefill_rps=prefill.question.rate_rps or 0.0,
        decode_rps=decode_rps,
        decode_batch=batch,
        transfer_bytes=transfer,
        transfer_s=transfer_s,
    )


def _decode(question: Question, replica: Replica, tpot_s: float) -> tuple[int, float]:
    """The largest batch within the TPOT, and the requests/s that it answers."""
    predictor, typical = predictor_of(question, replica), question.typical
    context = typical.prompt_tokens + typical.output_tokens // 2
    host = question.machine.calibration

    def seconds(batch: int) -> float:
        step_s = predictor.batch_seconds(decode_batch(batch, context))
        return step_s + host.host_step_s + batch * host.host_segment_s

    low, high = 0, num_at_once(question, replica)
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise InvalidRequestError("No decode meets the TPOT: a lone request misses it.")
    return low, low / (seconds(low) * max(1, typical.output_tokens - 1))


def instances(requests_per_s: float, capacity_per_s: float) -> int:
    """⌈λ/μ⌉, with μ what one instance serves within the SLO."""
    return max(1, ceil(requests_per_s / capacity_per_s - 1e-9))


def best_ratio(prefill_rps: float, decode_rps: float) -> tuple[int, int]:
    """Instances of prefill and decode, up to eight together, that answer most for each.

    >>> best_ratio(2.0, 6.0), best_ratio(8.0, 4.0), best_ratio(1.0, 1.0)
    ((3, 1), (1, 2), (1, 1))
    """
    pairs = [(p, d) for p in range(1, _MOST) for d in range(1, _MOST + 1 - p)]

    def per_instance(pair: tuple[int, int]) -> float:
        prefill, decode = pair
        return min(prefill * prefill_rps, decode * decode_rps) / (prefill + decode)

    return max(pairs, key=lambda pair: (round(per_instance(pair), 9), -sum(pair)))
