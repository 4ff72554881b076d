"""How long the simulation of very many replicas takes.

    python -m benchmarks.many_replicas [--replicas 1000] [--seconds 60] [--rate 1.3]

Llama 3.1 8B in bf16 on an L4 each, placed by price; 1,000 tokens in and 200 out, within a half of
that. One of them can do 1.6 such requests a second.
"""

import argparse
import hashlib
import json
import resource
import time

from ridgeline.core.config import EngineConfig
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.simulation import SimulatedMachine, simulate_fleet
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import catalogue_machine, poisson
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue

_KV_BYTES = 5e9


def simulated(device: str) -> SimulatedMachine:
    """Llama 3.1 8B in bf16 on one device."""
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    machine = catalogue_machine(load_catalogue(), device)
    config = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=16384)
    return SimulatedMachine.of_model(
        machine.run(PricedModel(spec=spec, ops=lower(spec))),
        machine.calibration,
        config,
        kv_pool_bytes=_KV_BYTES,
    )


def main() -> None:
    """Print one JSON line; ``digest`` is of all the requests' times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1.3)
    arguments = parser.parse_args()
    rate_rps = arguments.rate * arguments.replicas
    arrivals = poisson(
        rate_rps=rate_rps,
        num_requests=round(rate_rps * arguments.seconds),
        prompt_tokens=1000,
        output_tokens=200,
        spread=0.5,
    )
    machine, began_s = simulated("l4"), time.process_time()
    found = simulate_fleet(
        machine, arrivals, POLICIES["least-seconds"](), count=arguments.replicas
    ).traffic
    took_s = time.process_time() - began_s
    ends = b"".join(b"%a" % answer.done_s for answer in found.answers)
    print(
        json.dumps(
            {
                "replicas": arguments.replicas,
                "requests": len(arrivals),
                "processor_s": round(took_s, 1),
                "ms_per_request": round(1e3 * took_s / len(arrivals), 3),
                "mean_ttft_s": round(found.mean_ttft_s, 3),
                "mean_tpot_s": round(found.mean_tpot_s, 4),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "digest": hashlib.sha256(ends).hexdigest()[:16],
            }
        )
    )


if __name__ == "__main__":
    main()
