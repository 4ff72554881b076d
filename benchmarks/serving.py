"""What batching, chunked prefill and the prefix cache buy, on the executor that is the default.

    python -m benchmarks.serving [CASE ...]

From the repository's root. Prints each case and writes benchmarks/results/serving-DATE.json, unless
other processes took more than 5% of the machine meanwhile: then nothing is written. Ratios are
within one run, with the variants in turns where that is possible, since a shared machine drifts.
``batching-1b`` and ``transformers-1b`` take 12 minutes each, the others fewer.
"""

import argparse
import asyncio
import datetime
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.paths import PEERS
from benchmarks.shapes import shape_folder
from ridgeline import LLM, SamplingParams
from ridgeline.bench.conditions import Watch
from ridgeline.bench.serve.targets import EngineTarget
from ridgeline.core.config import EngineConfig
from ridgeline.core.host import usable_cores
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.models import PRESETS, read_config
from ridgeline.roofline.metrics import percentile
from ridgeline.weights import locate_model

RESULTS = Path(__file__).parent / "results"
LONG = {  # a shape small enough that an 8k prompt takes seconds on two cores
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
}
VOCAB = range(10, 1000)


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return rng.choices(VOCAB, k=count)


@contextmanager
def long_model() -> Iterator[str]:
    """A folder of the embedded model's tokenizer and a config of `LONG`, for random weights."""
    source = locate_model(None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copy(path, folder)
        config = {**read_config(source), **LONG}
        (folder / "config.json").write_text(json.dumps(config))
        yield str(folder)


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def trace_of_lengths(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 16 to 64 tokens and outputs of 10 to 1,000, log-uniform."""
    rng = random.Random(seed)
    prompts = [tokens(rng, rng.randint(16, 64)) for _ in range(count)]
    lengths = [round(10 * 100 ** rng.random()) for _ in range(count)]
    return prompts, [greedy(min(length, 1024 - 64)) for length in lengths]


@contextmanager
def subject(shape: str | None) -> Iterator[dict[str, Any]]:
    """What loads the embedded model, or random weights at a shape; no prefix cache."""
    settings: dict[str, Any] = {"enable_prefix_caching": False}
    if shape is None:
        yield settings
        return
    with shape_folder(shape) as folder:
        packed = str(PEERS / "packed")
        context = {"max_model_len": 1024, "packed_cache_path": packed}
        yield settings | context | {"model": str(folder), "load_format": "dummy"}


def batching(
    count: int = 64,
    slots: int = 16,
    alone: int = 12,
    shape: str | None = None,
    quantization: str | None = None,
) -> dict[str, Any]:
    """One trace under each batching policy: output tokens per second.

    ``static`` drops the rows of sequences that have ended; ``static, padded`` computes every row
    until the longest of its batch has ended, as ``transformers.generate`` does, and counts only
    the tokens that were asked for. Only the first ``alone`` requests run one at a time.
    """
    prompts, params = trace_of_lengths(count, seed=1)
    wanted = [each.max_tokens for each in params]
    longest = [max(wanted[at - at % slots : at - at % slots + slots]) for at in range(count)]
    variants: dict[str, tuple[dict[str, Any], int, list[int]]] = {
        "continuous": ({"batching": "continuous"}, count, wanted),
        "static": ({"batching": "static"}, count, wanted),
        "static, padded": ({"batching": "static"}, count, longest),
        "one at a time": ({"max_num_seqs": 1}, alone, wanted),
    }
    rates: dict[str, float] = {}
    with subject(shape) as model:
        for name, (policy, number, lengths) in variants.items():
            # Steps one by one, so that they can be compared.
            settings = {"max_num_seqs": slots, "decode_replay_s": 0.0, **policy}
            with LLM(**model, quantization=quantization, **settings) as llm:
                llm.generate(prompts[:2], greedy(8))
                began_s = time.perf_counter()
                llm.generate(prompts[:number], [greedy(length) for length in lengths[:number]])
                rates[name] = sum(wanted[:number]) / (time.perf_counter() - began_s)
    return {
        "shape": shape or "embedded",
        "quantization": quantization,
        "requests": count,
        "slots": slots,
        "output_tokens": sum(wanted),
        "output_tok_s": rates,
        **{
            f"continuous_over_{name}".replace(",", "").replace(" ", "_"): rates["continuous"] / rate
            for name, rate in rates.items()
            if name != "continuous"
        },
    }


def against_transformers(
    count: int = 64,
    slots: int = 16,
    sampled: int = 6,
    longest: int = 300,
    shape: str | None = None,
) -> dict[str, Any]:
    """The same trace, continuous, against one-at-a-time ``transformers.generate``, in bfloat16.

    ``transformers`` runs ``sampled`` of the requests, to ``longest`` tokens at the most.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    prompts, params = trace_of_lengths(count, seed=1)
    if shape is None:
        path = str(locate_model(None))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    else:
        config = LlamaConfig(**PRESETS[shape])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval()
    rates = {}
    sample = range(0, count, max(1, count // sampled))
    for warm in (True, False):
        began_s, done = time.perf_counter(), 0
        for index in list(sample)[: 1 if warm else None]:
            length = min(params[index].max_tokens, 8 if warm else longest)
            with torch.inference_mode():
                model.generate(
                    torch.tensor([prompts[index]]),
                    attention_mask=torch.ones(1, len(prompts[index]), dtype=torch.long),
                    do_sample=False,
                    min_new_tokens=length,
                    max_new_tokens=length,
                    pad_token_id=0,
                )
            done += length
        rates["transformers"] = done / (time.perf_counter() - began_s)
    del model
    with (
        subject(shape) as settings,
        LLM(**settings, max_num_seqs=slots, dtype="bfloat16") as llm,
    ):
        llm.generate(prompts[:2], greedy(8))
        began_s = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began_s
    rates["ridgeline"] = sum(each.max_tokens for each in params) / seconds
    return {
        "shape": shape or "embedded",
        "requests": count,
        "slots": slots,
        "output_tok_s": rates,
        "ratio": rates["ridgeline"] / rates["transformers"],
    }


def stall(
    pairs: int = 20, prompt_tokens: int = 4096, chunk: int = 512, parts: float | None = None
) -> dict[str, Any]:
    """Gaps of 8 running decodes while a long prompt arrives, chunked and whole in turns.

    With ``parts``, ``tpot_slo_s`` is that part of the seconds that the whole prompt takes: chunks
    are then as long as their price allows, and have no length in tokens.
    """
    return asyncio.run(_stall(pairs, prompt_tokens, chunk, parts))


async def _stall(pairs: int, prompt_tokens: int, chunk: int, parts: float | None) -> dict[str, Any]:
    rng = random.Random(2)
    stalls: dict[str, list[float]] = {"chunked": [], "whole": []}
    walls: dict[str, list[float]] = {"chunked": [], "whole": []}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(long_model())
        whole = EngineConfig(
            model=folder,
            load_format="dummy",
            enable_prefix_caching=False,
            max_num_seqs=16,
            max_model_len=12_288,
            max_num_batched_tokens=16_384,
        )
        engines = {"whole": await stack.enter_async_context(AsyncEngine(whole))}
        ttft_s = min([await _ttft(engines["whole"], tokens(rng, prompt_tokens)) for _ in range(3)])
        slo_s = ttft_s / parts if parts else None
        chunked = (
            replace(whole, tpot_slo_s=slo_s)
            if slo_s
            else replace(whole, max_num_batched_tokens=chunk)
        )
        engines["chunked"] = await stack.enter_async_context(AsyncEngine(chunked))
        await _one_arrival(engines["chunked"], [tokens(rng, 32)], tokens(rng, prompt_tokens))
        for pair in range(pairs):
            prompts = [tokens(rng, 32) for _ in range(8)]
            long_prompt = tokens(rng, prompt_tokens)
            for name in sorted(engines, reverse=bool(pair % 2)):
                gaps, seconds = await _one_arrival(engines[name], prompts, long_prompt)
                stalls[name] += gaps
                walls[name].append(seconds)
    p99 = {name: percentile(sorted(values), 0.99) for name, values in stalls.items()}
    ratios = [c / w for c, w in zip(walls["chunked"], walls["whole"], strict=True)]
    return {
        "pairs": pairs,
        "prompt_tokens": prompt_tokens,
        **({"tpot_slo_s": slo_s} if slo_s else {"chunk_tokens": chunk}),
        "stalls_measured": len(stalls["whole"]),
        "p99_stall_s": p99,
        "p50_stall_s": {name: statistics.median(values) for name, values in stalls.items()},
        "p99_whole_over_chunked": p99["whole"] / p99["chunked"],
        "throughput_chunked_over_whole": 1 / statistics.median(ratios),
    }


async def _ttft(engine: AsyncEngine, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt that is alone."""
    began_s = time.monotonic()
    async for _ in EngineTarget(engine).stream(tuple(prompt), 1):
        pass
    return time.monotonic() - began_s


async def _one_arrival(
    engine: AsyncEngine, prompts: list[list[int]], long_prompt: list[int], decodes: int = 80
) -> tuple[list[float], float]:
    """The largest gap of each decode while the long prompt is computed; seconds until all is done.

    The work is the same for both variants: every decode goes on until all its tokens are there.
    """
    target = EngineTarget(engine)
    times: list[list[float]] = [[] for _ in prompts]
    newcomer: list[float] = []

    async def read(prompt: list[int], count: int, arrived: list[float]) -> None:
        async for _ in target.stream(tuple(prompt), count):
            arrived.append(time.monotonic())

    began_s = time.monotonic()
    tasks = [
        asyncio.create_task(read(prompt, decodes, arrived))
        for prompt, arrived in zip(prompts, times, strict=True)
    ]
    while not all(len(arrived) >= 2 for arrived in times):
        await asyncio.sleep(0.001)
    arrival_s = time.monotonic()
    await read(long_prompt, 4, newcomer)
    await asyncio.gather(*tasks)
    gaps = [
        max(
            after - before
            for before, after in pairwise(arrived)
            if after > arrival_s and before < newcomer[0]
        )
        for arrived in times
        if arrived[-1] > arrival_s  # else it had ended before: this process was held up
    ]
    return gaps, time.monotonic() - began_s


def prefix(prompt_tokens: int = 4096, rounds: int = 5) -> dict[str, Any]:
    """TTFT at hit shares, against 1.1 × cold × the uncached share of the work + 5 ms."""
    rng = random.Random(3)
    shares = (0.5, 0.9, 0.99)
    cold: list[float] = []
    warm: dict[float, list[float]] = {share: [] for share in shares}
    with (
        long_model() as folder,
        LLM(folder, load_format="dummy", max_model_len=8192, max_num_batched_tokens=8192) as llm,
    ):
        block = llm.config.block_tokens

        def ttft_s(prompt: list[int]) -> float:
            (output,) = llm.generate(prompt, greedy(1))
            assert output.timings is not None
            assert output.timings.ttft_s is not None
            return output.timings.ttft_s

        ttft_s(tokens(rng, 512))
        for _ in range(rounds):
            known = tokens(rng, prompt_tokens)
            cold.append(ttft_s(known))
            for share in shares:
                kept = int(prompt_tokens * share) // block * block
                warm[share].append(ttft_s(known[:kept] + tokens(rng, prompt_tokens - kept)))
        spec = llm.spec
    median_cold = statistics.median(cold)
    result: dict[str, Any] = {"prompt_tokens": prompt_tokens, "cold_ttft_s": median_cold}
    for share in shares:
        kept = int(prompt_tokens * share) // block * block
        work = 1 - prefill_flops(spec, kept) / prefill_flops(spec, prompt_tokens)
        bound = 1.1 * median_cold * work + 0.005
        measured = statistics.median(warm[share])
        result[f"hit {share}"] = {
            "ttft_s": measured,
            "uncached_share_of_work": work,
            "bound_s": bound,
            "within_bound": measured <= bound,
        }
    return result


def prefill_flops(spec: ModelSpec, length: int) -> float:
    """2·N per token, and 4·L·H·h·Σctx for the causal square (docs/metrics.md, ROOFLINE)."""
    attention = spec.layers[0].attention
    hidden, kv = spec.hidden_size, LONG["num_key_value_heads"] * LONG["head_dim"]
    width = LONG["num_attention_heads"] * LONG["head_dim"]
    assert attention is not None
    matrices = 2 * hidden * width + 2 * hidden * kv + 3 * hidden * LONG["intermediate_size"]
    per_token = 2.0 * matrices * len(spec.layers)
    return per_token * length + 4.0 * len(spec.layers) * width * length * (length + 1) / 2


def conversation(turns: int = 10, rounds: int = 2) -> dict[str, Any]:
    """TTFT of the later turns of a conversation, and of questions about one long document."""
    result: dict[str, Any] = {}
    for name, first, each in (("10 turns", 1024, 256), ("shared document", 6144, 64)):
        ttfts: dict[str, list[float]] = {"on": [], "off": []}
        with long_model() as folder, ExitStack() as stack:
            llms = {
                name: stack.enter_context(
                    LLM(
                        folder,
                        load_format="dummy",
                        max_model_len=8192,
                        enable_prefix_caching=name == "on",
                    )
                )
                for name in ttfts
            }
            for round_number in range(rounds):
                rng = random.Random(round_number)
                history = {key: tokens(rng, first) for key in ("on",)}
                history["off"] = list(history["on"])
                for turn in range(turns):
                    new = tokens(rng, each)
                    for key, llm in llms.items():
                        prompt = history[key] + new
                        (output,) = llm.generate(prompt, greedy(32))
                        assert output.timings is not None
                        assert output.timings.ttft_s is not None
                        if turn:
                            ttfts[key].append(output.timings.ttft_s)
                        if name == "10 turns":
                            history[key] = prompt + list(output.outputs[0].token_ids)
        medians = {key: statistics.median(values) for key, values in ttfts.items()}
        result[name] = {"ttft_s": medians, "change": medians["on"] / medians["off"] - 1}
    return result


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "batching": batching,
    "batching-1b": partial(
        batching, count=32, slots=16, alone=1, shape="llama-3.2-1b", quantization="int4"
    ),
    "transformers": against_transformers,
    "transformers-1b": partial(
        against_transformers, count=128, slots=64, sampled=3, longest=96, shape="llama-3.2-1b"
    ),
    "stall": stall,
    "stall-8k": partial(stall, prompt_tokens=8192, chunk=768),
    "stall-8k-slo": partial(stall, prompt_tokens=8192, parts=6.5),
    "prefix": prefix,
    "conversation": conversation,
}


def main() -> None:
    """Run the cases; one result file a day, to which later runs of a case add."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(unknown)}")
    with LLM() as llm:
        executor = llm.config.executor
    path = RESULTS / f"serving-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.cases or CASES:
        watch = Watch()
        quick: dict[str, Any] = QUICK.get(name, {}) if arguments.quick else {}
        case = CASES[name](**quick)
        results[name] = {
            "executor": executor,
            **case,
            "conditions": watch.conditions(threads=usable_cores()),
        }
        print(name, json.dumps(results[name], indent=2))
        if results[name]["conditions"]["contended"]:
            print(f"{name}: other processes took part of the machine; not written.")
            del results[name]
        elif not arguments.quick:
            path.write_text(json.dumps(results, indent=2) + "\n")


QUICK = {
    "batching": {"count": 12, "slots": 4},
    "batching-1b": {"count": 4, "slots": 4, "alone": 1},
    "transformers": {"count": 12, "slots": 4},
    "transformers-1b": {"count": 4, "slots": 4, "sampled": 1, "longest": 8},
    "stall": {"pairs": 2, "prompt_tokens": 1024},
    "stall-8k": {"pairs": 2, "prompt_tokens": 1024},
    "stall-8k-slo": {"pairs": 2, "prompt_tokens": 1024},
    "prefix": {"rounds": 2, "prompt_tokens": 1024},
    "conversation": {"turns": 3, "rounds": 1},
}

if __name__ == "__main__":
    main()
