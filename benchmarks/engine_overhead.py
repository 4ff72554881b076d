"""Python's share of a step: the engine's loop over an executor that computes nothing.

    python benchmarks/engine_overhead.py [--batch 1 64] [--tokens 2000]

Prints microseconds per step and per token of schedule + plan + update + detokenize, with the
embedded model's tokenizer. ``--profile`` prints where they go.
"""

import argparse
import cProfile
import json
import pstats
import time

from ridgeline.core.plan import StepPlan
from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine import EngineLoop
from ridgeline.scheduler import Scheduler, SchedulerConfig
from ridgeline.text import Tokenizer
from ridgeline.weights import locate_model

_BLOCK_TOKENS = 16


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def set_masks(self, masks: object) -> None: ...

    def abort(self) -> None: ...

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class NothingExecutor:
    """Every sampled token is the next of a fixed text."""

    name = "nothing"

    def __init__(self, text: list[int]) -> None:
        self._text = text
        self._position = 0

    def submit(self, plan: StepPlan) -> _Done:
        (a_pass,) = plan.passes
        first = self._position = (self._position + 1) % (len(self._text) - a_pass.num_steps)
        token_ids = tuple(self._text[first : first + a_pass.num_steps])
        sampled = SegmentResult(token_ids=token_ids)
        results = tuple(
            sampled if segment.outputs.sample else SegmentResult() for segment in a_pass.segments
        )
        return _Done(StepResult(step_id=plan.step_id, passes=(results,)))


def measure(tokenizer: Tokenizer, *, batch: int, tokens: int, stop: tuple[str, ...]) -> dict:
    """Run ``batch`` requests of ``tokens`` tokens each to the end, decode steps timed."""
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        max_model_len=tokens + 64,
        num_blocks=(batch * ((tokens + 64) // _BLOCK_TOKENS + 1),),
        windows=(None,),
        block_tokens=_BLOCK_TOKENS,
    )
    text = tokenizer.encode(open(__file__, encoding="utf-8").read())
    loop = EngineLoop(NothingExecutor(text), Scheduler(config), tokenizer)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, stop=stop)
    for number in range(batch):
        prompt = tuple(text[number : number + 20])
        loop.add(
            Request(
                request_id=number, prompt_token_ids=prompt, params=params, seed=0, cache_key=b"k"
            )
        )
    loop.step()
    began, steps = time.process_time(), 0
    before = loop.stats().generated_tokens
    while loop.has_work:
        loop.step()
        steps += 1
    seconds = time.process_time() - began
    done = loop.stats().generated_tokens - before
    return {
        "batch": batch,
        "steps": steps,
        "us_per_step": round(seconds / steps * 1e6, 1),
        "us_per_token_and_sequence": round(seconds / done * 1e6, 2),
        "tokens_per_s": round(done / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--stop", nargs="*", default=[])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_folder(locate_model(None))
    for batch in arguments.batch:
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        case = measure(tokenizer, batch=batch, tokens=arguments.tokens, stop=tuple(arguments.stop))
        profile.disable()
        print(json.dumps(case))
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
