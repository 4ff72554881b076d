"""Searches over plans: the highest load, the cheapest machines, models on machines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.planning.capacity import CapacityPlan, answer, num_at_once, run_traffic
from ridgeline.planning.machine import Machine, catalogue_machine
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, choose_replica
from ridgeline.planning.traffic import Traffic
from ridgeline.roofline import decode_batch
from ridgeline.roofline.catalogue import Catalogue
from ridgeline.roofline.memory import USABLE_SHARE, kv_bytes, rank_pool_bytes, weights_bytes
from ridgeline.roofline.placement import Device, Item, Placement, place
from ridgeline.roofline.predict import StepPredictor

ATTAINMENT = 0.9  # share of requests that must meet every SLO
_COUNTS = (1, 2, 4, 8)
_STEPS = 6
_HIDDEN = 2.0
_BEYOND = 1.25  # times the throughput of a machine that fills and empties


def highest_rate(question: Question) -> CapacityPlan | None:
    """The highest Poisson load that is kept up with and whose requests meet the SLOs nine times of
    ten, by bisection.

    A model that does not fit has a plan that says so; ``None`` if a trickle does not meet them.
    """
    replica = choose_replica(question)
    if not replica.fit.fits:
        return answer(question)
    predictor = StepPredictor({ModelRole.TARGET: replica.model}, question.machine.calibration)
    saturated = run_traffic(replace(question, rate_rps=None), replica, predictor)
    low, high = 0.0, _BEYOND * saturated.completed_rps * replica.count
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _holds(run_traffic(replace(question, rate_rps=middle), replica, predictor), question):
            low = middle
        else:
            high = middle
    return answer(replace(question, rate_rps=low)) if low else None


def _if_it_holds(question: Question) -> CapacityPlan | None:
    """The plan; most machines of a search are too small, which one simulation shows."""
    replica = choose_replica(question)
    if not replica.fit.fits:
        return None
    predictor = StepPredictor({ModelRole.TARGET: replica.model}, question.machine.calibration)
    if _is_far_too_small(question, replica, predictor):
        return None
    traffic = run_traffic(question, replica, predictor)
    return answer(question, traffic) if _holds(traffic, question) else None


def _is_far_too_small(question: Question, replica: Replica, predictor: StepPredictor) -> bool:
    """Whether a rate takes twice the time that there is, in the best of batches.

    Twice, since prompts can hide behind the weights that decode steps read.
    """
    typical, at_once = question.typical, num_at_once(question, replica)
    decode = decode_batch(at_once, typical.prompt_tokens + typical.output_tokens // 2)
    seconds = predictor.segment_seconds(typical.prompt_tokens, 0)
    seconds += typical.output_tokens * predictor.batch_seconds(decode) / at_once
    return (question.rate_rps or 0.0) / replica.count * seconds > _HIDDEN


def _holds(traffic: Traffic, question: Question) -> bool:
    steady = traffic.steady() if question.trace else traffic
    return steady.keeps_up and traffic.attainment(question.slo) >= ATTAINMENT


def cheapest(
    question: Question, catalogue: Catalogue, progress: Callable[[str], object] = lambda _: None
) -> list[CapacityPlan]:
    """Machines of the catalogue with a price that hold the load, the cheapest first.

    Each device in ones, twos, fours and eights, until a number holds it. Devices without a rate for
    the model's type are left out. ``progress`` is told which machine is looked at.
    """
    found = []
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
            plan = _if_it_holds(replace(question, machine=machine, tensor=None))
            if plan is not None:
                found.append(plan)
                break
    return sorted(found, key=lambda plan: plan.usd_per_hour or 0.0)


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


def placement_json(placement: Placement, machine: Machine) -> Mapping[str, object]:
    """Plain values: device → models, and what is left over."""
    return {
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
