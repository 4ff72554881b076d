"""What a machine could do with a model of known shape, beside what an endpoint did.

Nobody tells which model and machine are behind an endpoint. A stand-in is a guess of both; measured
times that lie below its roof refute it, and others say how far from the roof it would be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.core.plan import ModelRole
from ridgeline.roofline import PricedModel, decode_batch, pass_work, prefill_batch
from ridgeline.roofline.catalogue import DeviceSpec
from ridgeline.roofline.explain import product_peak
from ridgeline.roofline.memory import weights_bytes
from ridgeline.roofline.metrics import mbu, mfu
from ridgeline.roofline.predict import StepPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInTime:
    """One measured time beside the stand-in's: a prompt's TTFT, or a step of decode (TPOT).

    ``roof_s`` is the least that bytes and FLOPs allow; ``predicted_s`` has an 80% interval.
    ``mfu`` and ``mbu`` are of the measured seconds; over 1 cannot be.
    """

    phase: str
    batch: int
    tokens: float
    measured_s: float
    roof_s: float
    predicted_s: float
    low_s: float
    high_s: float
    mfu: float
    mbu: float
    bound: str

    @property
    def is_possible(self) -> bool:
        return self.measured_s >= self.roof_s


def bound_of(
    predictor: StepPredictor, phase: str, batch_size: int, tokens: float, measured_s: float
) -> StandInTime:
    """Of a prompt of so many tokens alone, or of a step of ``batch_size`` sequences after them."""
    size = max(1, round(tokens))
    batch = prefill_batch(size) if phase == "prefill" else decode_batch(batch_size, size)
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    work, peak = pass_work(model, batch), product_peak(model, predictor.calibration)
    rate = ceilings.bytes_per_s(work.num_bytes)
    predicted = predictor.interval(predictor.batch_seconds(batch), phase)
    return StandInTime(
        phase=phase,
        batch=batch_size,
        tokens=tokens,
        measured_s=measured_s,
        roof_s=max(work.flops / peak, work.num_bytes / rate),
        predicted_s=predicted.seconds,
        low_s=predicted.low_s,
        high_s=predicted.high_s,
        mfu=mfu(work.flops, measured_s, peak),
        mbu=mbu(work.num_bytes, measured_s, rate),
        bound=predictor.bound(batch).value,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Implied:
    """Bytes and FLOPs a second that the shape alone implies, on whatever machine: of a step of one
    sequence, and of the slope of TTFT over input length."""

    bytes_per_s: float | None
    flops_per_s: float | None
    devices: tuple[str, ...]


def implied(
    model: PricedModel,
    devices: Mapping[str, DeviceSpec],
    *,
    context: float,
    tpot_s: float | None,
    prefill_tokens_s: float | None,
) -> Implied:
    """What the shape would have moved and computed, and which devices could have done so alone."""
    step = pass_work(model, decode_batch(1, max(1, round(context))))
    bytes_per_s = None if not tpot_s else step.num_bytes / tpot_s
    flops_per_s = None if prefill_tokens_s is None else _flops_per_token(model) * prefill_tokens_s
    return Implied(
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        devices=tuple(
            key
            for key, device in sorted(devices.items())
            if _could(device, model, bytes_per_s or 0.0, flops_per_s or 0.0)
        ),
    )


def _flops_per_token(model: PricedModel) -> float:
    """Of a prompt's token: between two lengths, since the head is counted once for a prompt."""
    short, long = (pass_work(model, prefill_batch(size)).flops for size in (64, 128))
    return (long - short) / 64


def _could(device: DeviceSpec, model: PricedModel, bytes_per_s: float, flops_per_s: float) -> bool:
    ceilings = device.ceilings()
    return (
        weights_bytes(model) <= device.memory_bytes
        and bytes_per_s <= ceilings.memory.bytes_per_s
        and ceilings.has_rate(model.main_product_format)
        and flops_per_s <= ceilings.peak_flops(model.main_product_format)
    )


def verdict(bounds: Sequence[StandInTime]) -> str:
    """Whether the stand-in can be what was measured: refuted by one time that the roof forbids,
    confirmed where most are as predicted."""
    beyond = [bound for bound in bounds if not bound.is_possible]
    if beyond:
        worst = max(beyond, key=lambda bound: bound.roof_s / bound.measured_s)
        return (
            f"It is not that: {worst.phase} was {worst.roof_s / worst.measured_s:.2f} times as "
            "fast as the roof allows. There are more devices, a smaller or more quantized model, "
            "cached prompts, or speculated tokens."
        )
    inside = sum(bound.low_s <= bound.measured_s <= bound.high_s for bound in bounds)
    slower = sum(bound.measured_s > bound.high_s for bound in bounds)
    told = (
        f"{inside} of {len(bounds)} times are within the 80% interval of their prediction, "
        f"{slower} above it and {len(bounds) - inside - slower} below"
    )
    if inside > len(bounds) / 2:
        return f"It can be that: nothing was faster than the roof allows, and {told}."
    return (
        f"Nothing speaks for it: {told}. It is not refuted, since nothing was faster than the "
        "roof allows."
    )
