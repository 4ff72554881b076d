"""Speculation against none, in turns, on the embedded pair or any other: speed-ups and acceptance.

    python -m benchmarks.speculation --batches 1,4 --pairs 20
    python -m benchmarks.speculation MODEL --draft-model DRAFT

Each pair of runs generates the same texts without and with speculation, in random order; a ratio
comes with the 95 % interval of its mean. The outputs of a pair must be equal. Two workloads: the
held-out texts go on freely (``continue``), and a text is written again with its first line changed
(``edit``), which repeats what the prompt says.
"""

import argparse
import json
import random
import statistics
import time
from importlib import resources

from ridgeline import LLM, SamplingParams
from ridgeline.core.request import RequestOutput

DRAFTERS = ("ngram", "suffix", "draft", "combined", "adaptive")
_T95 = 2.0  # Student's t at 95 %, for 20 pairs and more


def prompts(workload: str, count: int) -> list[str]:
    """Starts of held-out texts."""
    path = resources.files("ridgeline") / "assets/heldout/heldout.jsonl"
    texts = [json.loads(line).get("text", "") for line in path.read_text().splitlines()]
    texts = [text for text in texts if len(text) > 400][:count]
    if workload == "continue":
        return [text[:300] for text in texts]
    return [f"{text[:360]}\n# The same again:\n{text[:40]}" for text in texts]


def run(
    llm: LLM, texts: list[str], max_tokens: int, salt: str
) -> tuple[float, list[RequestOutput]]:
    """Seconds and outputs of one batch, greedy. Outputs of another ``salt`` are not remembered."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(texts, params, cache_salt=salt)
    return time.perf_counter() - started, outputs


def acceptance(outputs: list[RequestOutput]) -> list[float]:
    """Accepted share of the drafted tokens, by position."""
    samples = [output.outputs[0] for output in outputs]
    width = max((len(sample.num_drafted) for sample in samples), default=0)
    rates = []
    for position in range(width):
        counts = [
            (sample.num_accepted[position], sample.num_drafted[position])
            for sample in samples
            if position < len(sample.num_drafted)
        ]
        rates.append(round(sum(a for a, _ in counts) / max(1, sum(d for _, d in counts)), 3))
    return rates


def compare(
    off: LLM, on: LLM, texts: list[str], *, pairs: int, max_tokens: int
) -> dict[str, object]:
    """The speed-up of ``on`` over ``off``."""
    rng, ratios, outputs = random.Random(0), [], []
    for turn in range(pairs + 1):
        runs = {}
        for llm in rng.sample([off, on], 2):
            runs[llm] = run(llm, texts, max_tokens, f"{len(texts)}/{turn}")
        tokens = [[o.outputs[0].token_ids for o in runs[llm][1]] for llm in (off, on)]
        same = sum(a == b for a, b in zip(*tokens, strict=True))
        if turn:  # the first pair warms caches
            ratios.append(runs[off][0] / runs[on][0])
            outputs = runs[on][1]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {
        "speed_up": round(statistics.mean(ratios), 3),
        "interval": round(_T95 * spread, 3),
        "equal_outputs": f"{same}/{len(texts)}",
        "acceptance": acceptance(outputs),
    }


def main() -> None:
    """Print one JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--lengths", default="4")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    settings = {"max_model_len": 512, "enable_prefix_caching": False}
    with LLM(options.model, **settings) as off:
        for drafter in options.drafters.split(","):
            for length in map(int, options.lengths.split(",")):
                speculation = {"speculation": drafter, "num_speculative_tokens": length}
                if options.draft_model is not None:
                    speculation["draft_model"] = options.draft_model
                with LLM(options.model, **settings, **speculation) as on:
                    for workload in ("continue", "edit"):
                        for batch in map(int, options.batches.split(",")):
                            texts = prompts(workload, batch)
                            figures = compare(
                                off, on, texts, pairs=options.pairs, max_tokens=options.max_tokens
                            )
                            case = {"drafter": drafter, "length": length, "workload": workload}
                            print(json.dumps(case | {"batch": batch} | figures), flush=True)


if __name__ == "__main__":
    main()
