"""Models beside each other on a machine: fit, speed at a context, concurrency and cost.

Formulas on predicted steps, without a simulation: a model takes milliseconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.plan import ModelRole
from ridgeline.planning.cost import usd_per_million_tokens
from ridgeline.planning.machine import Machine
from ridgeline.planning.question import MAX_SEQS, Question
from ridgeline.planning.replica import choose_replica
from ridgeline.roofline import PricedModel, decode_batch, prefill_batch
from ridgeline.roofline.memory import kv_bytes, num_parameters
from ridgeline.roofline.predict import Prediction, StepPredictor
from ridgeline.roofline.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedModel:
    """One model on one machine; what does not fit has no seconds.

    Attributes:
        model, hardware: their names; ``num_devices`` hold a replica.
        parameters: elements of all weights.
        context: tokens of the prompt, or the longest that the model takes with its output.
        weights_bytes, kv_bytes: of the weights, and of one sequence.
        max_batch: sequences of that context that have room.
        prefill, decode: seconds of the prompt, and of a token at batch 1.
        concurrency: sequences that decode at once within the TPOT limit, at the most 256.
        tpot_s: seconds of a token then.
        output_tok_s: of requests one after another in such a batch, prompts included.
        meets_slo: whether a request that is alone, and one in that batch, keep the limits.
        usd_per_1m_output: ``None`` where the machine has no price.
        score: of the model, by whoever ranks; ``None`` if it has none.
    """

    model: str
    hardware: str
    num_devices: int
    parameters: int
    format: str
    context: int
    weights_bytes: float
    kv_bytes: float
    max_batch: int
    prefill: Prediction | None = None
    decode: Prediction | None = None
    concurrency: int = 0
    tpot_s: float | None = None
    output_tok_s: float = 0.0
    meets_slo: bool = False
    usd_per_1m_output: float | None = None
    score: float | None = None

    @property
    def fits(self) -> bool:
        return self.max_batch > 0


def rank_model(
    name: str,
    model: PricedModel,
    machine: Machine,
    *,
    context: int,
    output_tokens: int,
    slo: Slo,
    score: float | None = None,
) -> RankedModel:
    """Predict one model on the fewest devices of a machine that hold it.

    Raises:
        InvalidRequestError: the machine has no rate for the model's numbers.
    """
    context = max(1, min(context, model.spec.max_position - output_tokens))
    output_tokens = min(output_tokens, model.spec.max_position - context)
    question = Question(
        model=model, machine=machine, prompt_tokens=context, output_tokens=output_tokens
    )
    replica = choose_replica(question)
    held, memory = replica.model, replica.fit
    num_devices = held.layout.tensor
    bare = RankedModel(
        model=name,
        hardware=machine.name,
        num_devices=num_devices,
        parameters=num_parameters(model),
        format=model.main_format.name,
        context=context,
        weights_bytes=memory.weights_bytes * num_devices,
        kv_bytes=kv_bytes(model, context + output_tokens),
        max_batch=memory.max_batch,
        score=score,
    )
    if not bare.fits:
        return bare
    predictor = StepPredictor({ModelRole.TARGET: held}, machine.calibration)
    middle = context + output_tokens // 2

    def token_s(batch: int) -> float:
        return predictor.batch_seconds(decode_batch(batch, middle))

    prefill_s = predictor.batch_seconds(prefill_batch(context))
    batch = largest_within(token_s, slo.tpot_s, min(memory.max_batch, MAX_SEQS))
    tpot_s = token_s(max(1, batch))
    end_s = prefill_s + tpot_s * (output_tokens - 1)
    rate = batch * output_tokens / (batch * prefill_s + output_tokens * tpot_s)
    usd = None if machine.usd_per_hour is None else machine.usd_per_hour * num_devices
    return replace(
        bare,
        prefill=predictor.interval(prefill_s, "prefill"),
        decode=predictor.interval(token_s(1), "decode"),
        concurrency=batch,
        tpot_s=tpot_s,
        output_tok_s=rate,
        meets_slo=batch > 0 and slo.met(ttft_s=prefill_s, tpot_s=tpot_s, end_to_end_s=end_s),
        usd_per_1m_output=usd_per_million_tokens(usd, rate) if usd is not None and rate else None,
    )


def order_ranked(found: Sequence[RankedModel], by: str) -> list[RankedModel]:
    """The best first: what meets the limits before what fits before what does not, then by
    ``score``, ``speed`` (tokens per second), ``cost`` or ``memory``; what is unknown comes last."""

    def key(each: RankedModel) -> tuple[bool, bool, bool, float]:
        figure = {
            "score": None if each.score is None else -each.score,
            "speed": -each.output_tok_s,
            "cost": each.usd_per_1m_output,
            "memory": each.weights_bytes + each.kv_bytes,
        }[by]
        return not each.fits, not each.meets_slo, figure is None, figure or 0.0

    return sorted(found, key=key)


def largest_within(token_s: Callable[[int], float], limit_s: float | None, most: int) -> int:
    """The largest batch whose step takes no longer than the limit; 0 if none does."""
    if limit_s is None or token_s(most) <= limit_s:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if token_s(middle) <= limit_s:
            low = middle
        else:
            high = middle
    return low
