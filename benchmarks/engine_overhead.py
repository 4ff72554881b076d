"""Python's share of a step: the engine's loop over an executor that computes nothing.

    python benchmarks/engine_overhead.py [--batch 1 64] [--tokens 1000] [--tiny]

Prints processor microseconds per step and per token of schedule + plan + update + detokenize, with
the embedded model's tokenizer. ``--profile`` prints where they go. ``--tiny`` runs a tiny model of
random weights on the default executor instead, end to end, with and without decode replay.
"""

import argparse
import cProfile
import json
import pstats
import shutil
import tempfile
import time
from pathlib import Path

from ridgeline import LLM, SamplingParams
from ridgeline.core.plan import StepPlan
from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.engine.loop import EngineLoop
from ridgeline.models import read_config
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
    text = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
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


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def end_to_end(*, batch: int, tokens: int, replay_s: float) -> dict[str, float]:
    """Tokens per wall second of `LLM.generate`, best of three, prompts included."""
    with tempfile.TemporaryDirectory() as name:
        source, folder = locate_model(None), Path(name)
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy(path, folder)
        (folder / "config.json").write_text(json.dumps({**read_config(source), **TINY}))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        settings = {"load_format": "dummy", "decode_replay_s": replay_s, "max_num_seqs": batch}
        with LLM(name, **settings) as llm:
            prompts = [[number + 10, 20, 30] for number in range(batch)]
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                llm.generate(prompts, params)
                seconds.append(time.perf_counter() - began)
            executor = llm.config.executor
    return {
        "batch": batch,
        "executor": executor,
        "decode_replay_s": replay_s,
        "tokens_per_s": round(batch * tokens / min(seconds)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--stop", nargs="*", default=[])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.tiny:
        for batch in arguments.batch:
            for replay_s in (0.0, 0.008):
                case = end_to_end(batch=batch, tokens=arguments.tokens, replay_s=replay_s)
                print(json.dumps(case))
        return
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
