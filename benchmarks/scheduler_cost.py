"""What the scheduler costs in microseconds: a decode step, and a token put into the prefix cache.

    python benchmarks/scheduler_cost.py

No model runs. Sequences of 8,192 tokens decode; timed is `schedule` + `update`. Then prompts that
share nothing pass through the prefix cache; timed is the lookup and the insertion of their blocks.
Times are the thread's own processor time, so that other programs do not count. Prints one JSON
object.
"""

import argparse
import json
import statistics
import time

from ridgeline.core.plan import StepPlan
from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.settings.scheduling import SCHEDULING_POLICIES
from ridgeline.kvcache import PrefixCache
from ridgeline.scheduler import Scheduler, SchedulerConfig

CONTEXT, BLOCK_TOKENS = 8192, 16
_TOKEN, _NONE = SegmentResult(token_ids=(7,)), SegmentResult()


def result_of(plan: StepPlan) -> StepResult:
    """What an executor would give back: a token for each segment that samples."""
    segments = plan.passes[-1].segments
    outcomes = tuple(_TOKEN if segment.outputs.sample else _NONE for segment in segments)
    return StepResult(step_id=plan.step_id, passes=(outcomes,))


def decode_step_us(batch: int, *, steps: int, policy: str) -> dict[str, float]:
    """Microseconds of steps in which ``batch`` sequences of 8,192 tokens decode, of 8 tenants."""
    blocks = batch * (CONTEXT // BLOCK_TOKENS + 1 + steps // BLOCK_TOKENS + 1)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=batch * CONTEXT,
            max_model_len=blocks // batch * BLOCK_TOKENS,
            num_blocks=(blocks,),
            windows=(None,),
            block_tokens=BLOCK_TOKENS,
            scheduling_policy=policy,
        )
    )
    for number in range(batch):
        scheduler.add(
            Request(
                request_id=number,
                # Lengths differ, so that blocks fill in different steps, as they do in service.
                prompt_token_ids=(number % 1000,) * (CONTEXT - number % BLOCK_TOKENS),
                params=SamplingParams(),
                seed=number,
                cache_key=number.to_bytes(4, "little"),
                tenant=f"tenant {number % 8}",
            )
        )
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, result_of(plan))
    times: list[float] = []
    for _ in range(steps):
        start = time.thread_time()
        plan = scheduler.schedule()
        middle = time.thread_time()
        assert plan is not None
        assert plan.num_tokens == batch
        result = result_of(plan)
        resumed = time.thread_time()
        scheduler.update(plan, result)
        times.append(time.thread_time() - resumed + middle - start)
    times.sort()
    return {
        "batch": batch,
        "median_us": round(statistics.median(times) * 1e6, 1),
        "p90_us": round(times[int(0.9 * len(times))] * 1e6, 1),
    }


def cache_miss_us_per_token(prompts: int = 40) -> float:
    """Microseconds per token of prompts of 8,192 tokens that find nothing."""
    blocks_each = CONTEXT // BLOCK_TOKENS
    cache = PrefixCache([prompts * blocks_each], [None], BLOCK_TOKENS)
    seconds = 0.0
    for number in range(prompts):
        tokens = [number] * CONTEXT
        blocks = cache.pools[0].allocate(blocks_each)
        start = time.thread_time()
        assert not cache.match(b"root", tokens).nodes
        node = None
        for entry, block in enumerate(blocks):
            first = entry * BLOCK_TOKENS
            node = cache.insert(b"root", node, tokens[first : first + BLOCK_TOKENS], [block])
        seconds += time.thread_time() - start
    return round(seconds / (prompts * CONTEXT) * 1e6, 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policy", choices=SCHEDULING_POLICIES, default="priority")
    arguments = parser.parse_args()
    report = {
        "context_tokens": CONTEXT,
        "policy": arguments.policy,
        "schedule_and_update": [
            decode_step_us(batch, steps=arguments.steps, policy=arguments.policy)
            for batch in arguments.batches
        ],
        "prefix_cache_us_per_token_at_0_hits": cache_miss_us_per_token(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
