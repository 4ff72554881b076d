"""How much of the KV memory that is taken holds no token, paged and contiguous.

    python benchmarks/kv_waste.py

Prompt and output lengths are log-normal with the means that Kwon et al. 2023 (SOSP, section 6.1,
figure 11) publish for ShareGPT: 161 and 338 tokens; the spread is that of a long-tailed chat mix
(σ = 1 of the logarithm), cut to a context of 2,048. The real scheduler runs the requests without a
model, 64 at once. After each step, measured the same way: the slots taken and the tokens in them.
Contiguous allocation takes, for each running request, the whole context, the next power of two of
prompt and output together, or exactly prompt and output (which nobody knows in advance): the three
that the paper's figure 2 compares. Prints one JSON object.
"""

import argparse
import json
import math
import random

from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.scheduler import Scheduler, SchedulerConfig

MEAN_PROMPT, MEAN_OUTPUT, SIGMA, CONTEXT = 161, 338, 1.0, 2048
_TOKEN, _NONE = SegmentResult(token_ids=(7,)), SegmentResult()


def lengths(rng: random.Random) -> tuple[int, int]:
    """Prompt and output tokens of one request."""

    def draw(mean: float, most: int) -> int:
        value = rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
        return max(4, min(most, round(value)))

    prompt = draw(MEAN_PROMPT, CONTEXT // 2)
    return prompt, draw(MEAN_OUTPUT, CONTEXT - prompt)


def measure(block_tokens: int, num_requests: int, seed: int) -> dict[str, float]:
    """Wasted share of the memory taken, over all steps of a run."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_model_len=CONTEXT,
            num_blocks=(64 * CONTEXT // block_tokens,),
            windows=(None,),
            block_tokens=block_tokens,
        )
    )
    reserved: dict[int, tuple[int, int]] = {}
    for number in range(num_requests):
        prompt, output = lengths(rng)
        scheduler.add(
            Request(
                request_id=number,
                prompt_token_ids=(7,) * prompt,
                params=SamplingParams(max_tokens=output),
                seed=0,
            )
        )
        total = prompt + output
        reserved[number] = (total, 1 << (total - 1).bit_length())
    tokens = paged = whole = power = exact = 0
    while (plan := scheduler.schedule()) is not None:
        segments = plan.passes[0].segments
        outcomes = tuple(_TOKEN if s.outputs.sample else _NONE for s in segments)
        updates = scheduler.update(plan, StepResult(step_id=plan.step_id, passes=(outcomes,)))
        (usage,) = scheduler.kv_usage()
        tokens += usage.num_tokens
        paged += usage.num_slots
        for update in updates:
            if not update.sequence.is_finished:
                total, rounded = reserved[update.sequence.request.request_id]
                whole, power, exact = whole + CONTEXT, power + rounded, exact + total
    return {
        "block_tokens": block_tokens,
        "paged_waste": round(1 - tokens / paged, 4),
        "contiguous_whole_context_waste": round(1 - tokens / whole, 4),
        "contiguous_power_of_two_waste": round(1 - tokens / power, 4),
        "contiguous_exact_length_waste": round(1 - tokens / exact, 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-tokens", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = {
        "mean_prompt_tokens": MEAN_PROMPT,
        "mean_output_tokens": MEAN_OUTPUT,
        "context": CONTEXT,
        "waste": [
            measure(size, arguments.requests, arguments.seed) for size in arguments.block_tokens
        ],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
