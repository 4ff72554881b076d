"""Policies of a router compared by simulation: the scheduler of an engine in each of N replicas.

    python -m benchmarks.router_policies [--replicas 8] [--seeds 3] [--requests 600]

Five shapes of traffic, each near what eight replicas can do, and the share of requests within 0.5 s
to the first token and 50 ms a token; `prefix`, weights and overlap stand for other routers.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from statistics import fmean

from ridgeline.core.config import EngineConfig
from ridgeline.fleet.policies import POLICIES, EngineChoice, Policy, Wanted
from ridgeline.fleet.simulation import FleetTraffic, SimulatedMachine, simulate_fleet
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import catalogue_machine
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.slo import Slo

_SLO = Slo(ttft_s=0.5, tpot_s=0.05)
_KV_BYTES = 24e9


class Weights:
    """Scores added up by fixed weights, as llm-d's default: prefix 3, queue 2, KV use 2."""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        most = max(each.load.num_pending for each in candidates) or 1
        used = max(each.load.context_tokens for each in candidates) or 1

        def score(each: EngineChoice) -> float:
            load = each.load
            prefix = each.cached_tokens / wanted.prompt_tokens
            queue, kv = 1 - load.num_pending / most, 1 - load.context_tokens / used
            return 3 * prefix + 2 * queue + 2 * kv

        return sorted(candidates, key=score, reverse=True)


class Overlap:
    """Tokens that are to be prefilled there plus tokens that decode there, as Dynamo's router."""

    def ranked(self, wanted: Wanted, candidates: Sequence[EngineChoice]) -> list[EngineChoice]:
        def cost(each: EngineChoice) -> int:
            own = wanted.prompt_tokens - each.cached_tokens
            return each.load.pending_tokens + own + each.load.context_tokens

        return sorted(candidates, key=cost)


OURS: dict[str, Callable[[], Policy]] = dict(POLICIES)
OTHERS: dict[str, Callable[[], Policy]] = {"weights (llm-d)": Weights, "overlap (Dynamo)": Overlap}
# `prefix` is SGLang's threshold.


def shape(name: str, *, requests: int, rate_rps: float, seed: int) -> list[Arrival]:
    """Arrivals of a kind of traffic."""
    rng = random.Random(f"{name}/{seed}")
    found, now_s = list[Arrival](), 0.0
    turns: dict[int, int] = {}
    for number in range(requests):
        rate = rate_rps
        if name == "bursts":
            rate *= 3.0 if number // 40 % 4 == 0 else 0.75
        now_s += rng.expovariate(rate)
        prefix, shared = "", 0
        output = max(8, round(rng.lognormvariate(4.6, 0.7)))
        if name == "chat":
            prompt = max(16, round(rng.lognormvariate(5.5, 0.8)))
        elif name == "documents":
            long = rng.random() < 0.2
            prompt, output = (
                (rng.randint(6000, 12000), 60) if long else (rng.randint(50, 400), output)
            )
        elif name == "agents":
            agent = min(15, int(rng.paretovariate(1.1)) - 1)
            prefix, shared = f"agent {agent}", 3000 + 100 * agent
            prompt = shared + rng.randint(50, 500)
        elif name == "conversations":
            who = rng.randrange(60)
            turns[who] = turns.get(who, 0) + 1
            if turns[who] > 12:
                turns[who] = 1
            prompt = 300 + 350 * turns[who]
            prefix, shared = f"user {who}", prompt
        else:
            prompt = rng.randint(200, 1500)
        found.append(
            Arrival(
                arrival_s=now_s,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix=prefix,
                prefix_tokens=shared,
            )
        )
    return found


RATES = {"chat": 340.0, "documents": 22.0, "agents": 86.0, "conversations": 180.0, "bursts": 110.0}


def run(
    name: str, policy: Policy, *, replicas: int, requests: int, seed: int, device: str, load: float
) -> FleetTraffic:
    """One simulation of Llama 3.1 8B in bf16."""
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    machine = catalogue_machine(load_catalogue(), device)
    model = machine.run(PricedModel(spec=spec, ops=lower(spec)))
    rate = RATES[name] * replicas / 8 * load
    arrivals = shape(name, requests=requests, rate_rps=rate, seed=seed)
    config = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=16384)
    simulated = SimulatedMachine.of_model(
        model, machine.calibration, config, kv_pool_bytes=_KV_BYTES
    )
    return simulate_fleet(simulated, arrivals, policy, count=replicas)


def main() -> None:
    """Print the share for each shape and policy, and one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--device", default="a100")
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--shapes", default=",".join(RATES))
    arguments = parser.parse_args()
    policies = OURS | OTHERS
    table: dict[str, dict[str, float]] = {}
    for name in arguments.shapes.split(","):
        row = table[name] = {}
        for policy, make in policies.items():
            runs = [
                run(name, make(), replicas=arguments.replicas, requests=arguments.requests,
                    seed=seed, device=arguments.device, load=arguments.load)
                for seed in range(arguments.seeds)
            ]  # fmt: skip
            traffic = [each.traffic for each in runs]
            row[policy] = round(fmean(each.attainment(_SLO) for each in traffic), 4)
            hits = fmean(each.hit_share for each in runs)
            ttft = fmean(each.mean_ttft_s for each in traffic)
            print(f"{name:14} {policy:18} within {row[policy]:6.1%}  "
                  f"mean TTFT {ttft:6.3f} s  cached {hits:5.1%}", flush=True)  # fmt: skip
    print(json.dumps(table))


if __name__ == "__main__":
    main()
