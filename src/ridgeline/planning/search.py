"""Searches over plans: the highest load, the cheapest machines, models on machines."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.planning.capacity import CapacityPlan, holds, plan_of, predictor_of
from ridgeline.planning.load import Skipped, num_at_once, run_alone, run_traffic
from ridgeline.planning.machine import Machine, catalogue_machine
from ridgeline.planning.notes import machine_notes, model_notes
from ridgeline.planning.placement import Bin, Item, Placement, place
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, replica_choices
from ridgeline.roofline import decode_batch
from ridgeline.roofline.catalogue import Catalogue
from ridgeline.roofline.memory import USABLE_SHARE, kv_bytes, rank_pool_bytes, weights_bytes
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
    unpriced = [device.name for device in catalogue.devices.values() if not device.usd_per_hour]
    notes = [f"No price, so not looked at: {', '.join(unpriced)}."] if unpriced else []
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
    return Ranking(plans=plans, notes=[*skipped.notes, *notes])


@dataclass(frozen=True, kw_only=True)
class ModelDemand:
    """A model and the requests per second that it must serve; 0 for one replica, just held."""

    name: str
    question: Question
    rate_rps: float


_MOST_LOADS = 8  # of a search: its cost doubles with each
_CLOSE = 3  # kinds of devices for each load that are simulated


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where replicas are, on the ``machines`` of each device."""

    machines: Sequence[Machine]
    placement: Placement
    notes: Sequence[str] = ()

    @property
    def usd_per_hour(self) -> float | None:
        """Of the devices that hold something; ``None`` where one has no price."""
        bins = zip(self.machines, self.placement.bins, strict=True)
        prices = [machine.usd_per_hour for machine, items in bins if items]
        return None if None in prices else sum(price or 0.0 for price in prices)


def place_models(
    loads: Sequence[ModelDemand], machines: Sequence[Machine], *, memory_share: float = USABLE_SHARE
) -> Placed:
    """Replicas of several models on devices, perhaps of several kinds, each on one.

    A replica takes its weights and the KV of its concurrent requests, and the share of the device's
    time that its load takes; ``memory_share`` of a device may be taken. A load beyond the capacity
    of the slowest kind that holds it is split into equal replicas.
    """
    items = [item for load in loads for item in _items(load, machines)]
    each = [replace(machine, count=1) for machine in machines for _ in range(machine.count)]
    devices = [
        Bin(name=machine.key, kind=machine.key, memory_bytes=machine.memory_bytes * memory_share)
        for machine in each
    ]
    return Placed(machines=each, placement=place(items, devices), notes=_notes(loads, machines))


def cheapest_placement(
    loads: Sequence[ModelDemand],
    catalogue: Catalogue,
    *,
    memory_share: float = USABLE_SHARE,
    progress: Callable[[str], object] = lambda _: None,
) -> Placed | None:
    """The cheapest devices of the catalogue that hold all loads, or ``None``.

    Loads are split into groups; the devices of a group are of one kind, those of two groups may
    differ (all groupings, by dynamic programming over subsets). Of the kinds that a load fits, the
    three that look cheapest for it are simulated.

    Raises:
        InvalidRequestError: there are more than eight loads.
    """
    if len(loads) > _MOST_LOADS:
        raise InvalidRequestError(
            f"At most {_MOST_LOADS} models are placed on devices to be found."
        )
    found = dict[str, tuple[Machine, dict[int, list[Item]]]]()
    for index, load in enumerate(loads):
        for machine in _likely(load, catalogue, memory_share):
            progress(f"{load.name} on {machine.name}")
            _, items = found.setdefault(machine.key, (machine, {}))
            items[index] = _items(load, [machine])
    groups = dict[int, tuple[float, Machine, Placement]]()
    for mask in range(1, 1 << len(loads)):
        indices = [index for index in range(len(loads)) if mask >> index & 1]
        for machine, items in found.values():
            if not all(index in items for index in indices):
                continue
            held = [item for index in indices for item in items[index]]
            memory = machine.memory_bytes * memory_share
            device = Bin(name=machine.key, kind=machine.key, memory_bytes=memory)
            placed = place(held, [device] * len(held))
            usd = placed.num_used * (machine.usd_per_hour or 0.0)
            if not placed.left_over and (mask not in groups or usd < groups[mask][0]):
                groups[mask] = (usd, machine, placed)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for mask in range(1, 1 << len(loads)):
        options = [
            (best[mask ^ part][0] + groups[part][0], (*best[mask ^ part][1], part))
            for part in groups
            if part & mask == part and mask ^ part in best
        ]
        if options:
            best[mask] = min(options)
    if (whole := (1 << len(loads)) - 1) not in best:
        return None
    chosen = [groups[part] for part in best[whole][1]]
    filled = [(machine, items) for _, machine, placed in chosen for items in placed.bins if items]
    machines = [machine for machine, _ in filled]
    placement = Placement(bins=tuple(items for _, items in filled), left_over=())
    return Placed(machines=machines, placement=placement, notes=_notes(loads, machines))


def _likely(load: ModelDemand, catalogue: Catalogue, memory_share: float) -> list[Machine]:
    """Priced devices that hold a replica, those first whose best batches are the cheapest."""
    ranked = list[tuple[float, int, Machine]]()
    for key, device in catalogue.devices.items():
        if device.usd_per_hour is None:
            continue
        if not device.ceilings().has_rate(load.question.model.activations):
            continue
        machine = catalogue_machine(catalogue, key)
        question = replace(load.question, machine=machine, tensor=1)
        replica = replica_choices(question)[0]
        if _held_bytes(question) > machine.memory_bytes * memory_share or not replica.fit.fits:
            continue
        busy_s = _busy_s(question, replica) if load.rate_rps else 0.0
        usd = (machine.usd_per_hour or 0.0) * max(1.0, load.rate_rps * busy_s)
        ranked.append((usd, len(ranked), machine))
    machines = [machine for _, _, machine in sorted(ranked)]
    return machines[:_CLOSE] if load.rate_rps else machines


def _busy_s(question: Question, replica: Replica) -> float:
    """Seconds of a device that a request takes, in the best of batches."""
    predictor, typical = predictor_of(question, replica), question.typical
    at_once = num_at_once(question, replica)
    decode = decode_batch(at_once, typical.prompt_tokens + typical.output_tokens // 2)
    decode_s = typical.output_tokens * predictor.batch_seconds(decode) / at_once
    return decode_s + predictor.segment_seconds(typical.prompt_tokens, 0)


def _held_bytes(question: Question) -> float:
    """Weights, and the KV of one sequence as the engine holds it."""
    config = question.config
    return weights_bytes(question.model) + rank_pool_bytes(
        replace(question.model, layout=ParallelLayout()),
        question.longest,
        block_tokens=config.block_tokens,
    )


def _items(load: ModelDemand, machines: Sequence[Machine]) -> list[Item]:
    """A load's replicas, all alike, with what each takes on every kind of device."""
    memory = _held_bytes(load.question)
    if not load.rate_rps:
        return [Item(name=load.name, memory_bytes=memory)]
    held = dict[str, tuple[float, float]]()  # requests/s and seconds that one stays
    for machine in machines:
        question = replace(load.question, machine=replace(machine, count=1), tensor=1)
        best = highest_rate(question)
        if best is not None and best.traffic is not None and best.question.rate_rps:
            held[machine.key] = (best.question.rate_rps, best.traffic.mean_end_to_end_s)
    if not held:
        return [Item(name=load.name, memory_bytes=memory, time_share=inf)]
    replicas = ceil(load.rate_rps / min(capacity for capacity, _ in held.values()))
    rate_rps = load.rate_rps / replicas
    weights, each = (
        weights_bytes(load.question.model),
        kv_bytes(load.question.model, load.question.longest),
    )
    on = {
        key: (max(memory, weights + rate_rps * stay_s * each), rate_rps / capacity)
        for key, (capacity, stay_s) in held.items()
    }
    return [Item(name=load.name, memory_bytes=memory, time_share=inf, on=on)] * replicas


def _notes(loads: Sequence[ModelDemand], machines: Sequence[Machine]) -> list[str]:
    """What to know about the prices of a placement."""
    formats = {load.question.model.main_format.name for load in loads}
    of_machines = [note for machine in machines for note in machine_notes(machine, formats)]
    of_models = [note for load in loads for note in model_notes(load.question)]
    return list(dict.fromkeys([*of_machines, *of_models]))


def placement_json(placed: Placed) -> dict[str, Any]:
    """Plain values: device → models, what is left over, and what to know about the prices."""
    numbers = Counter[str]()
    devices = dict[str, list[str]]()
    for machine, items in zip(placed.machines, placed.placement.bins, strict=True):
        devices[f"{machine.key}:{numbers[machine.key]}"] = [item.name for item in items]
        numbers[machine.key] += 1
    return {
        "notes": list(placed.notes),
        "devices": devices,
        "used": placed.placement.num_used,
        "left_over": [item.name for item in placed.placement.left_over],
        "usd_per_hour": placed.usd_per_hour,
    }
