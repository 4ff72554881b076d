"""How much of the KV memory that is taken holds no token, paged and contiguous.

Prompt and output lengths are log-normal with the means that Kwon et al. 2023 (SOSP, section 6.1,
figure 11) publish for ShareGPT: 161 and 338 tokens; the spread is that of a long-tailed chat mix
(σ = 1 of the logarithm), cut to a context of 2,048. The real scheduler runs the requests without a
model, 64 at once. After each step, measured the same way: the slots taken and the tokens in them.
"""

import math
import random
from dataclasses import dataclass

from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.scheduler import Scheduler, SchedulerConfig

MEAN_PROMPT, MEAN_OUTPUT, SIGMA, CONTEXT = 161, 338, 1.0, 2048
_TOKEN, _NONE = SegmentResult(token_ids=(7,)), SegmentResult()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWaste:
    """Shares of the memory taken, over all steps of a run: ``paged``, and where each running
    request takes the whole context, the next power of two of prompt and output together, or exactly
    these (which nobody knows in advance): the three that the paper's figure 2 compares."""

    paged: float
    whole_context: float
    power_of_two: float
    exact_length: float


def kv_waste(*, block_tokens: int, num_requests: int, seed: int) -> KVWaste:
    """Run so many requests."""
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
    reserved: dict[int, int] = {}
    for number in range(num_requests):
        prompt, output = _lengths(rng)
        scheduler.add(
            Request(
                request_id=number,
                prompt_token_ids=(7,) * prompt,
                params=SamplingParams(max_tokens=output),
                seed=0,
            )
        )
        reserved[number] = prompt + output
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
                total = reserved[update.sequence.request.request_id]
                whole += CONTEXT
                power += 1 << (total - 1).bit_length()
                exact += total
    return KVWaste(
        paged=1 - tokens / paged,
        whole_context=1 - tokens / whole,
        power_of_two=1 - tokens / power,
        exact_length=1 - tokens / exact,
    )


def _lengths(rng: random.Random) -> tuple[int, int]:
    """Prompt and output tokens of one request."""

    def draw(mean: float, most: int) -> int:
        value = rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
        return max(4, min(most, round(value)))

    prompt = draw(MEAN_PROMPT, CONTEXT // 2)
    return prompt, draw(MEAN_OUTPUT, CONTEXT - prompt)
