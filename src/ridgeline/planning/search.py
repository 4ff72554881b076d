"""Searches over plans: the highest load, the cheapest machines, models on machines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.planning.capacity import CapacityPlan, holds, plan_of, predictor_of
from ridgeline.planning.load import Skipped, num_at_once, run_alone, run_traffic
from ridgeline.planning.machine import Machine, catalogue_machine
from ridgeline.planning.notes import machine_notes, model_notes
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, replica_choices
from ridgeline.roofline import decode_batch
from ridgeline.roofline.catalogue import Catalogue
from ridgeline.roofline.memory import USABLE_SHARE, kv_bytes, rank_pool_bytes, weights_bytes
from ridgeline.roofline.placement import Device, Item, Placement, place
from ridgeline.roofline.predict import StepPredictor

_COUNTS = (1, 2, 4, 8)
_STEPS = 6
_HIDDEN = 2.0
_NEVER = 1.25  # times the answers of the best batches of decode alone: beyond, it falls behind
_BEYOND = 1.25  # times the throughput of a machine that fills and empties


def highest_rate(question: Question) -> CapacityPlan | None:
    """The highest Poisson load that is kept up with and whose requests meet the SLOs nine times of
    ten, by bisection, over all `replica_choices`.

    A model that does not fit has a plan that says so; ``None`` if a trickle does not meet them.
    Rates and ways that would take too long to simulate are left out, and a note says so.

    Raises:
        InvalidRequestError: the load or the layout contradicts the model or the machine.
        TooLongError: no rate meets them of those that can be simulated.
    """
    choices, best, highest_rps = replica_choices(question), None, 0.0
    if not choices[0].fit.fits:
        return plan_of(question, choices[0])
    skipped = Skipped()
    for replica in choices:
        rate_rps = 0.0
        with skipped.at(replica.text):
            rate_rps = _highest_rate_rps(question, replica, skipped, beyond_rps=highest_rps)
        if rate_rps > highest_rps:
            best, highest_rps = replica, rate_rps
    if best is None:
        skipped.raise_if_any()
        return None
    notes = (*question.notes, *skipped.notes)
    return plan_of(replace(question, rate_rps=highest_rps, notes=notes), best)


def _highest_rate_rps(
    question: Question, replica: Replica, skipped: Skipped, *, beyond_rps: float
) -> float:
    """That of one way to spread the model; at most ``beyond_rps`` if it does not hold more."""
    predictor = predictor_of(question, replica)
    if _misses_alone(question, replica, predictor):
        return 0.0

    def holds_rate(rate_rps: float) -> bool:
        asked = replace(question, rate_rps=rate_rps)
        with skipped.at(f"{rate_rps:.3g} requests/s {replica.text}"):
            return holds(run_traffic(asked, replica, predictor), asked)
        return False

    saturated = run_traffic(replace(question, rate_rps=None), replica, predictor)
    low, high = beyond_rps, _BEYOND * saturated.completed_rps * replica.count
    if high <= low or (low and not holds_rate(low)):
        return 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if holds_rate(middle):
            low = middle
        else:
            high = middle
    return low


def _if_it_holds(question: Question) -> CapacityPlan | None:
    """The plan; most machines of a search are too small, which one simulation shows.

    Raises:
        TooLongError: none holds of the ways to spread the model that can be simulated.
    """
    skipped = Skipped()
    for replica in replica_choices(question):
        if not replica.fit.fits:
            return None
        predictor = predictor_of(question, replica)
        if _is_far_too_small(question, replica, predictor):
            continue
        with skipped.at(replica.text):
            if _misses_alone(question, replica, predictor):
                continue
            traffic = run_traffic(question, replica, predictor)
            if holds(traffic, question):
                return plan_of(question, replica, traffic)
    skipped.raise_if_any()
    return None


def _misses_alone(question: Question, replica: Replica, predictor: StepPredictor) -> bool:
    """Whether a lone request misses the SLOs, where all are alike: then none meets them."""
    if question.trace or not question.slo.is_set:
        return False
    return not run_alone(question, replica, predictor).attainment(question.slo)


def _is_far_too_small(question: Question, replica: Replica, predictor: StepPredictor) -> bool:
    """Whether a rate takes twice the time that there is, in the best of batches, or its decode
    steps alone take more.

    Twice, since prompts can hide behind the weights that decode steps read.
    """
    typical, at_once = question.typical, num_at_once(question, replica)
    decode = decode_batch(at_once, typical.prompt_tokens + typical.output_tokens // 2)
    rate_rps = (question.rate_rps or 0.0) / replica.count
    prompt_s = predictor.segment_seconds(typical.prompt_tokens, 0)
    decode_s = typical.output_tokens * predictor.batch_seconds(decode) / at_once
    return rate_rps * (prompt_s + decode_s) > _HIDDEN or rate_rps * decode_s > _NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Machines that hold a load, the cheapest first, and sentences on those not looked at."""

    plans: Sequence[CapacityPlan]
    notes: Sequence[str] = ()


def cheapest(
    question: Question, catalogue: Catalogue, progress: Callable[[str], object] = lambda _: None
) -> Ranking:
    """Machines of the catalogue with a price that hold the load.

    Each device in ones, twos, fours and eights, until a number holds it. Devices without a rate for
    the model's type are left out; so are machines on which the load would take too long to
    simulate, and a note names them. ``progress`` is told which machine is looked at.
    """
    found, skipped = [], Skipped()
    for key, device in catalogue.devices.items():
        if device.usd_per_hour is None or not device.ceilings().has_rate(
            question.model.activations
        ):
            continue
        for count in _COUNTS:
            if count > 1 and device.link_gb_per_s is None:
                break
            machine = catalogue_machine(catalogue, key, count)
            progress(f"{count} × {machine.name}")
            plan = None
            with skipped.at(f"{count} × {machine.name}"):
                plan = _if_it_holds(replace(question, machine=machine, tensor=None))
            if plan is not None:
                found.append(plan)
                break
    plans = sorted(found, key=lambda plan: plan.usd_per_hour or 0.0)
    return Ranking(plans=plans, notes=skipped.notes)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and the requests per second that it must serve; 0 for one replica, just held."""

    name: str
    question: Question
    rate_rps: float


def place_models(loads: Sequence[Load], machine: Machine) -> Placement:
    """Replicas of several models on the machine's devices, each on one.

    A replica takes its weights and the KV of its concurrent requests, and the share of the device's
    time that its load takes. A load beyond one device's capacity is split into equal replicas.
    """
    items = [item for load in loads for item in _items(load, machine)]
    devices = [
        Device(
            name=f"{machine.key}:{index}",
            memory_bytes=machine.memory_bytes * USABLE_SHARE,
            usd_per_hour=machine.usd_per_hour or 0.0,
        )
        for index in range(machine.count)
    ]
    return place(items, devices)


def _items(load: Load, machine: Machine) -> list[Item]:
    question = replace(load.question, machine=replace(machine, count=1), tensor=1)
    config = question.config
    memory = weights_bytes(question.model) + rank_pool_bytes(
        replace(question.model, layout=ParallelLayout()),
        question.longest,
        step_tokens=config.max_num_batched_tokens,
        block_tokens=config.block_tokens,
    )
    if not load.rate_rps:
        return [Item(name=load.name, memory_bytes=memory)]
    best = highest_rate(question)
    if best is None or best.traffic is None:
        return [Item(name=load.name, memory_bytes=memory, time_share=float("inf"))]
    capacity = best.question.rate_rps or 0.0
    replicas = max(1, -int(-load.rate_rps // capacity))
    share = load.rate_rps / replicas / capacity
    in_flight = load.rate_rps / replicas * best.traffic.mean_end_to_end_s
    held = weights_bytes(question.model) + in_flight * kv_bytes(question.model, question.longest)
    item = Item(name=load.name, memory_bytes=max(memory, held), time_share=share)
    return [item] * replicas


def placement_json(
    placement: Placement, loads: Sequence[Load], machine: Machine
) -> Mapping[str, object]:
    """Plain values: device → models, what is left over, and what to know about the prices."""
    of_models = (note for load in loads for note in model_notes(load.question))
    return {
        "notes": list(dict.fromkeys([*machine_notes(machine), *of_models])),
        "devices": {
            f"{machine.key}:{index}": [item.name for item in items]
            for index, items in enumerate(placement.bins)
        },
        "used": placement.num_used,
        "left_over": [item.name for item in placement.left_over],
        "usd_per_hour": (
            None if machine.usd_per_hour is None else machine.usd_per_hour * placement.num_used
        ),
    }
