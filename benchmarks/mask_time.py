"""Time of grammar masks on a vocabulary of 128,000 tokens, over the schemas of the tests.

    python -m benchmarks.mask_time           # of each mask alone
    python -m benchmarks.mask_time overlap   # what masks add to steps of the 1B shape, in int4

The vocabulary is made of the words, runs of marks, and pairs of them that are most frequent in the
Python sources of this installation, which gives a trie like that of a trained tokenizer.
"""

import argparse
import itertools
import json
import random
import re
import sysconfig
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from tests.decoding.grammars.schemas import BY_HAND, generated

from ridgeline.bench.ladder.measuring import open_executor
from ridgeline.bench.ladder.rungs import Rung
from ridgeline.bench.ladder.subjects import SUBJECTS
from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import Request
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.decoding.grammars.vocabulary import SLICES
from ridgeline.engine.loop import EngineLoop
from ridgeline.scheduler import Scheduler, SchedulerConfig, Speculation

VOCAB_SIZE = 128_000
INT4 = Rung(name="int4", executor="cpu", dtype="bfloat16", quantization="int4")
_PIECES = re.compile(rb" ?[A-Za-z]+|[0-9]{1,3}|\s+|[^\sA-Za-z0-9]{1,4}")


class Words:
    """What llguidance reads of a tokenizer; texts are split greedily."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, num_bytes: int) -> None:
        counts: Counter[bytes] = Counter()
        for folder in ("stdlib", "purelib"):
            for path in sorted(Path(sysconfig.get_path(folder)).rglob("*.py")):
                data = path.read_bytes()
                num_bytes -= len(data)
                pieces = _PIECES.findall(data)
                counts.update(pieces)
                counts.update(map(b"".join, pairwise(pieces)))
                if num_bytes < 0:
                    break
        single = [bytes([value]) for value in range(256)]
        longer = [piece for piece, _ in counts.most_common() if len(piece) > 1]
        self.tokens = [*single, b"</s>", *longer][:VOCAB_SIZE]
        self.special_token_ids = [256]
        self._ids = {token: index for index, token in enumerate(self.tokens)}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = []
        while data:
            size = next(n for n in range(min(16, len(data)), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def measure(num_schemas: int) -> dict[str, float]:
    """Microseconds of each mask of random outputs, and seconds of what comes before."""
    words = Words(10_000_000)
    started = time.perf_counter()
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=VOCAB_SIZE, slices=list(SLICES))
    vocabulary_s = time.perf_counter() - started
    compiler = GrammarCompiler(lambda: vocabulary)
    rng, times, cpu_times, compiles = random.Random(0), [], [], []
    for schema in [*BY_HAND, *map(generated, range(num_schemas - len(BY_HAND)))]:
        started = time.perf_counter()
        try:
            constraint = compiler.prepare(StructuredOutputs.of({"json": schema}))()
        except InvalidRequestError:
            continue
        compiles.append(time.perf_counter() - started)
        for _ in range(60):
            started, cpu_started = time.perf_counter(), time.thread_time()
            mask = constraint.masks(())
            cpu_times.append(1e6 * (time.thread_time() - cpu_started))
            times.append(1e6 * (time.perf_counter() - started))
            words_of_mask = np.flatnonzero(mask[0])
            if not len(words_of_mask) or constraint.is_complete:
                break
            word = int(rng.choice(words_of_mask))
            constraint.advance([32 * word + int(mask[0, word]).bit_length() - 1])
    compiler.close()
    return {
        "tokens": len(words.tokens),
        "schemas": len(compiles),
        "masks": len(times),
        "p50_us": round(float(np.percentile(times, 50)), 1),
        "p90_us": round(float(np.percentile(times, 90)), 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
        "max_us": round(max(times), 1),
        "cpu_p99_us": round(float(np.percentile(cpu_times, 99)), 1),
        "compile_p50_ms": round(1e3 * float(np.median(compiles)), 2),
        "vocabulary_s": round(vocabulary_s, 2),
    }


def overlap(rounds: int) -> dict[str, object]:
    """Decode steps with a grammar in turns with steps without, at batch 1.

    The grammar forces nothing, so that both take the same steps; masked steps wait for their mask
    before they sample, and cannot be planned ahead.
    """
    executor = open_executor(SUBJECTS["1b"], INT4, ())
    vocab_size = executor.spec().vocab_size
    words = Words(10_000_000)
    words.tokens += [b""] * (vocab_size - len(words.tokens))
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, slices=list(SLICES))
    compiler = GrammarCompiler(lambda: vocabulary)
    config = EngineConfig(
        max_num_seqs=1,
        max_model_len=256,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 40,
    )
    layout = executor.kv_layout()
    resolved = resolve(
        config,
        spec=executor.spec(),
        executor=executor.name,
        dtype="",
        block_bytes=layout.block_bytes,
        free_bytes=0,
    )
    executor.allocate_kv(resolved.num_blocks)
    windows = tuple(group.window for group in layout.groups)
    scheduler = Scheduler(
        SchedulerConfig.of_engine(config, resolved, windows=windows),
        Speculation(constraints=compiler),
    )
    loop = EngineLoop(executor, scheduler, None)
    numbers, rng = itertools.count(), random.Random(0)

    def seconds(wanted: StructuredOutputs | None) -> float:
        """Of one step, the first of an output left out."""
        params = SamplingParams(max_tokens=49, structured_outputs=wanted, ignore_eos=True)
        prompt = tuple(rng.choices(range(1000, 2000), k=64))
        loop.add(Request(request_id=next(numbers), prompt_token_ids=prompt, params=params, seed=1))
        while not any(chunk.token_ids for chunk in loop.step()):
            pass
        started = time.perf_counter()
        steps = sum(bool(loop.step()) for _ in iter(lambda: loop.has_work, False))
        return (time.perf_counter() - started) / steps

    grammar = StructuredOutputs.of({"regex": "([A-Za-z]+[ ,.;]|[0-9]{1,6} )*"})
    seconds(grammar), seconds(None)
    added, plain = [], []
    for _ in range(rounds):
        times = {each: seconds(each) for each in rng.sample([grammar, None], 2)}
        plain.append(times[None])
        added.append(times[grammar] / times[None] - 1)
    compiler.close()
    executor.close()
    return {
        "step_ms": round(1e3 * float(np.median(plain)), 2),
        "added": round(float(np.mean(added)), 4),
        "interval": round(2.1 * float(np.std(added, ddof=1)) / rounds**0.5, 4),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("alone", "overlap"), default="alone")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    is_alone = options.what == "alone"
    print(json.dumps(measure(options.schemas) if is_alone else overlap(options.rounds)))


if __name__ == "__main__":
    main()
