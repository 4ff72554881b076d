"""Prompts on one engine and outputs on another: when that pays, and whether a router knows.

    python -m benchmarks.disaggregation [--requests 400] [--seeds 2] [--cases 18]

Simulated engines on one clock (`ridgeline.fleet.disaggregated`). Of each case: without, with the
best fixed split of the engines, and with the router's decision; felt seconds of a request (to its
first token, and a tenth of those after it), and the share of requests within 1 s and 30 ms a token.
The decision's sign is right where it hands over most streams if a split saves 5 % of the felt
seconds, and less than a tenth if all cost 5 %. Prints a line for each case and one JSON object.
"""

import argparse
import json
from statistics import fmean
from typing import NamedTuple

from benchmarks.router_policies import shape
from ridgeline.core.config import EngineConfig
from ridgeline.fleet.disaggregated import SimulatedLink, simulate_disaggregated
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.simulation import FleetTraffic, SimulatedMachine, simulate_fleet
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import Arrival, catalogue_machine, poisson
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.memory import kv_bytes_per_token
from ridgeline.roofline.slo import Slo

_SLO = Slo(ttft_s=1.0, tpot_s=0.03)
_KV_BYTES = 40e9
_BEYOND = 0.05
_MOST, _FEW = 0.5, 0.1  # of streams, handed over


class Case(NamedTuple):
    """Requests a second on so many engines, and the wire between two of them in GB/s."""

    name: str
    rate_rps: float
    prompt_tokens: int
    output_tokens: int
    count: int = 4
    gb_per_s: float = 10.0
    device: str = "a100"
    shape: str = ""


CASES = (
    Case("long prompts", 8, 3000, 200),
    Case("long prompts, near the limit", 10, 3000, 200),
    Case("long prompts, light load", 2, 3000, 200),
    Case("longer prompts", 4, 6000, 200),
    Case("short prompts, long outputs", 20, 500, 300),
    Case("short prompts, short outputs", 60, 500, 30),
    Case("slow wire", 8, 3000, 200, gb_per_s=0.3),
    Case("10 Gbit/s", 8, 3000, 200, gb_per_s=1.25),
    Case("two engines", 4, 3000, 200, count=2),
    Case("two engines, slow wire", 3, 3000, 200, count=2, gb_per_s=0.3),
    Case("three engines", 5, 3000, 200, count=3),
    Case("eight engines", 18, 3000, 200, count=8),
    Case("L4, long prompts", 2, 1500, 150, device="l4"),
    Case("L4, slow wire", 2, 1500, 150, device="l4", gb_per_s=0.1),
    Case("chat", 120, 0, 0, shape="chat"),
    Case("a fifth documents", 6, 0, 0, shape="documents"),
    Case("agents", 30, 0, 0, shape="agents"),
    Case("bursts", 30, 0, 0, shape="bursts"),
)


def arrivals_of(case: Case, requests: int, seed: int) -> list[Arrival]:
    """The requests of a case."""
    if case.shape:
        return shape(case.shape, requests=requests, rate_rps=case.rate_rps, seed=seed)
    return poisson(
        rate_rps=case.rate_rps,
        num_requests=requests,
        prompt_tokens=case.prompt_tokens,
        output_tokens=case.output_tokens,
        spread=0.5,
        seed=seed,
    )


def machine_of(device: str) -> tuple[SimulatedMachine, float]:
    """Llama 3.1 8B on a device, and the bytes of KV of a token."""
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    machine = catalogue_machine(load_catalogue(), device)
    model = machine.run(PricedModel(spec=spec, ops=lower(spec)))
    kv_bytes = _KV_BYTES if device == "a100" else 5e9
    config = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=16384)
    simulated = SimulatedMachine.of_model(
        model, machine.calibration, config, kv_pool_bytes=kv_bytes
    )
    return simulated, kv_bytes_per_token(model)


def felt_s(found: FleetTraffic) -> float:
    """Of a request, in the mean."""
    times = [each.timings for each in found.traffic.answers]
    first = fmean(each.ttft_s or each.end_to_end_s for each in times)
    return 0.9 * first + 0.1 * fmean(each.end_to_end_s for each in times)


def compare(case: Case, *, requests: int, seeds: int) -> dict[str, float | str | bool]:
    """Felt seconds, and requests within the limits, in the mean of all seeds."""
    machine, token_bytes = machine_of(case.device)
    link = SimulatedLink(token_bytes=token_bytes, bytes_per_s=case.gb_per_s * 1e9)
    felt: dict[str, list[float]] = {}
    within: dict[str, list[float]] = {}
    shares = []
    for seed in range(seeds):
        arrivals = arrivals_of(case, requests, seed)
        found = {
            "off": simulate_fleet(machine, arrivals, POLICIES["least-seconds"](), count=case.count)
        }
        found["auto"], share = simulate_disaggregated(machine, arrivals, link, count=case.count)
        shares.append(share)
        for split in range(1, case.count):
            found[f"{split}:{case.count - split}"], _ = simulate_disaggregated(
                machine, arrivals, link, count=case.count, num_prefill=split
            )
        for name, traffic in found.items():
            felt.setdefault(name, []).append(felt_s(traffic))
            within.setdefault(name, []).append(traffic.traffic.attainment(_SLO))
    mean = {name: fmean(each) for name, each in felt.items()}
    good = {name: fmean(each) for name, each in within.items()}
    best = min((name for name in mean if ":" in name), key=mean.__getitem__)
    share = fmean(shares)
    pays = mean[best] < (1 - _BEYOND) * mean["off"]
    costs = mean[best] > (1 + _BEYOND) * mean["off"]
    is_right = share > _MOST if pays else share < _FEW if costs else True
    return {
        "case": case.name,
        "best": best,
        "felt_best": round(mean[best] / mean["off"], 3),
        "felt_auto": round(mean["auto"] / mean["off"], 3),
        "within_off": round(good["off"], 3),
        "within_best": round(good[best], 3),
        "within_auto": round(good["auto"], 3),
        "handed_over": round(share, 2),
        "sign": "pays" if pays else "costs" if costs else "neither",
        "is_right": is_right,
    }


def main() -> None:
    """Print a line for each case, and all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cases", type=int, default=len(CASES))
    arguments = parser.parse_args()
    rows = []
    for case in CASES[: arguments.cases]:
        row = compare(case, requests=arguments.requests, seeds=arguments.seeds)
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    signs = [row["is_right"] for row in rows if row["sign"] != "neither"]
    least = min(1 / float(row["felt_auto"]) for row in rows)
    print(json.dumps({"right": sum(map(bool, signs)), "of": len(signs), "least": round(least, 3)}))


if __name__ == "__main__":
    main()
