"""``ridgeline fleet plan``: replicas simulated, from the fewest to those that suffice."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ridgeline.cli import plan as plan_command
from ridgeline.cli.display import output_console, print_columns, print_paragraph
from ridgeline.cli.fleet_file import FleetFile, FleetLimits, PlannedLoad
from ridgeline.cli.options import Parser
from ridgeline.cli.priced_model import check_model, read_model
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.fleet.disaggregated import SimulatedLink, simulate_disaggregated
from ridgeline.fleet.policies import POLICIES, Policy
from ridgeline.fleet.simulation import FleetTraffic, SimulatedMachine, simulate_fleet
from ridgeline.planning.replica import choose_replica
from ridgeline.planning.workload import Arrival, poisson, read_trace
from ridgeline.roofline.memory import kv_bytes_per_token
from ridgeline.roofline.slo import Slo

_PRICED = ("dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens")
_SPREAD = 0.5  # of lengths around their mean
_WORTH = 0.02  # of goodput
_MOST_SIMULATED = 64
_SHORT_S = 30.0  # of arrivals, in which a queue that grows without end may not be seen
_DEVICES = 8  # of which a replica takes as many as it needs


def plan(file: FleetFile, *, num_requests: int) -> dict[str, Any]:
    """Every number of replicas up to the first that keeps the limits; with that, prompts on engines
    of their own.

    Raises:
        InvalidRequestError: there is no load or no limit, or the model does not fit.
        SettingsError: the policy is none.
    """
    load, limits, policy = _asked(file, num_requests)
    arguments = _arguments(file, load)
    check_model(arguments)
    hardware = plan_command.machine_of(arguments)
    model = read_model(arguments, hardware.calibration)
    question = plan_command.question_of(arguments, model, hardware, limits.slo)
    chosen = choose_replica(question)
    if not chosen.fit.fits:
        raise InvalidRequestError("The model does not fit: give more devices (layout.tensor).")
    machine = SimulatedMachine.of_model(
        chosen.model, hardware.calibration, question.config, kv_pool_bytes=chosen.kv_pool_bytes
    )
    arrivals = _arrivals(load, num_requests)
    notes, span_s = list(question.notes), arrivals[-1].arrival_s
    if span_s < _SHORT_S:
        notes.append(
            f"{len(arrivals)} requests come within {span_s:.0f} s, too short to see a queue that "
            "grows: simulate more (--requests)."
        )
    usd = hardware.usd_per_hour and hardware.usd_per_hour * chosen.model.layout.tensor
    most = file.budget.affordable(file.budget.max_replicas or _MOST_SIMULATED, usd)
    points = list[dict[str, Any]]()
    for count in range(file.budget.min_replicas, most + 1):
        traffic = simulate_fleet(machine, arrivals, policy(), count=count)
        points.append(_point(traffic, limits.slo, usd, {"replicas": count}))
        if points[-1]["within_limits"] >= limits.attainment:
            break
    best = max(points, key=lambda each: (each["within_limits"], -each["replicas"]))
    link = SimulatedLink(
        token_bytes=kv_bytes_per_token(chosen.model), bytes_per_s=file.network_gb_per_s * 1e9
    )
    splits = [
        _point(
            simulate_disaggregated(
                machine, arrivals, link, count=best["replicas"], num_prefill=num_prefill
            )[0],
            limits.slo,
            usd,
            {"replicas": best["replicas"], "prefill": num_prefill},
        )
        for num_prefill in range(1, best["replicas"])
    ]
    return {
        "model": model.name,
        "hardware": hardware.name,
        "devices_of_a_replica": chosen.model.layout.tensor,
        "limits": str(limits.slo),
        "target": limits.attainment,
        "points": points,
        "chosen": best if best["within_limits"] >= limits.attainment else None,
        "disaggregated": splits,
        "network_gb_per_s": file.network_gb_per_s,
        "notes": notes,
    }


def _asked(
    file: FleetFile, num_requests: int
) -> tuple[PlannedLoad, FleetLimits, Callable[[], Policy]]:
    """The load, the limits and the router's policy."""
    if file.load is None or (file.load.rate_rps is None) == (file.load.trace is None):
        raise InvalidRequestError("A plan needs load.rate_rps or load.trace.")
    if file.slo is None:
        raise InvalidRequestError(
            "A plan needs limits: slo.ttft_s, slo.tpot_s or slo.end_to_end_s."
        )
    if (name := str(file.router_settings.get("policy", "least-seconds"))) not in POLICIES:
        raise SettingsError(f"router.policy must be one of {', '.join(POLICIES)}.")
    if num_requests < 1:
        raise InvalidRequestError("--requests is at least 1.")
    return file.load, file.slo, POLICIES[name]


def _arguments(file: FleetFile, load: PlannedLoad) -> argparse.Namespace:
    """As of a command line of ``ridgeline plan``."""
    parser = Parser()
    plan_command.add_options(parser)
    found = parser.parse_args([])
    settings = file.engine_settings
    if settings.get("pipeline_parallel_size", 1) != 1:
        raise InvalidRequestError(
            "Plans of fleets know no layout.pipeline; see `ridgeline plan --layouts`."
        )
    for name in _PRICED:
        if settings.get(name) is not None:
            setattr(found, name, settings[name])
    found.model, found.hardware, found.usd_per_hour = file.model, file.hardware, file.usd_per_hour
    found.tensor_parallel = settings.get("tensor_parallel_size")
    if file.hardware != "this":
        found.count = found.tensor_parallel or _DEVICES
    if load.trace is not None:
        found.trace = Path(load.trace)
    else:
        found.rate, found.prompt, found.output = (
            load.rate_rps,
            load.prompt_tokens,
            load.output_tokens,
        )
    return found


def _arrivals(load: PlannedLoad, num_requests: int) -> list[Arrival]:
    if load.trace is not None:
        return read_trace(Path(load.trace))[:num_requests]
    assert load.rate_rps is not None
    return poisson(
        rate_rps=load.rate_rps,
        num_requests=num_requests,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        spread=_SPREAD,
    )


def _point(
    fleet: FleetTraffic, slo: Slo, usd: float | None, which: Mapping[str, int]
) -> dict[str, Any]:
    traffic = fleet.traffic
    hour_usd = None if usd is None else usd * which["replicas"]
    goodput_rps = traffic.goodput_rps(slo)
    return {
        **which,
        "within_limits": traffic.attainment(slo),
        "goodput_rps": goodput_rps,
        "ttft_s": traffic.mean_ttft_s,
        "tpot_s": traffic.mean_tpot_s,
        "usd_per_hour": hour_usd,
        "usd_per_1k_requests": (
            hour_usd / goodput_rps / 3.6 if hour_usd is not None and goodput_rps else None
        ),
    }


def print_plan(found: Mapping[str, Any]) -> None:
    """For people."""
    console, points, chosen = output_console(), found["points"], found["chosen"]
    count = found["devices_of_a_replica"]
    print_paragraph(
        console,
        f"{found['model']} on {found['hardware']}, {count} a replica; simulated, limits "
        f"{found['limits']} for {found['target']:.0%} of the requests",
        indent=2,
    )
    _print_points(("replicas",), points)
    if chosen is None:
        text = f"{points[-1]['replicas']} replicas do not keep them."
    else:
        text = f"{chosen['replicas']} keep them"
        usd = chosen["usd_per_hour"]
        text += "." if usd is None else f", for ${usd:.2f} an hour."
    print_paragraph(console, text, indent=2)
    splits = found["disaggregated"]
    if splits:
        before = max(points, key=lambda each: (each["within_limits"], -each["replicas"]))
        _print_points(("prefill", "replicas"), splits)
        best = max(splits, key=lambda each: each["goodput_rps"])
        gain = best["goodput_rps"] / before["goodput_rps"] - 1 if before["goodput_rps"] else 0.0
        pays = gain > _WORTH
        text = f"Prompts on {best['prefill']} of {best['replicas']} replicas alone "
        text += "pay" if pays else "do not pay here"
        text += f": {gain:+.0%} goodput, with {found['network_gb_per_s']:g} GB/s between replicas."
        print_paragraph(console, text, indent=2)
    for note in found["notes"]:
        print_paragraph(console, note, indent=2)


def _print_points(labels: tuple[str, ...], points: list[dict[str, Any]]) -> None:
    rows = [
        (
            *(str(each[name]) for name in labels),
            f"{each['within_limits']:.1%}",
            f"{each['goodput_rps']:.2f}",
            f"{1e3 * each['ttft_s']:,.0f}",
            f"{1e3 * each['tpot_s']:.1f}",
            "" if each["usd_per_hour"] is None else f"{each['usd_per_hour']:.2f}",
            "" if each["usd_per_1k_requests"] is None else f"{each['usd_per_1k_requests']:.3f}",
        )
        for each in points
    ]
    header = (*labels, "within limits", "goodput/s", "TTFT ms", "TPOT ms", "$/hour", "$/1K good")
    print_columns(output_console(), header, rows)
