"""Time of grammar masks on a vocabulary of 128,000 tokens, over the schemas of the tests.

    python -m benchmarks.mask_time

The vocabulary is made of the words, runs of marks, and pairs of them that are most frequent in the
Python sources of this installation, which gives a trie like that of a trained tokenizer.
"""

import argparse
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

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars import GrammarCompiler

VOCAB_SIZE = 128_000
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
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=VOCAB_SIZE)
    vocabulary_s = time.perf_counter() - started
    compiler = GrammarCompiler(lambda: vocabulary)
    rng, times, compiles = random.Random(0), [], []
    for schema in [*BY_HAND, *map(generated, range(num_schemas - len(BY_HAND)))]:
        started = time.perf_counter()
        try:
            constraint = compiler(StructuredOutputs.of({"json": schema}))
        except InvalidRequestError:
            continue
        compiles.append(time.perf_counter() - started)
        for _ in range(60):
            started = time.perf_counter()
            mask = constraint.masks(())
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
        "compile_p50_ms": round(1e3 * float(np.median(compiles)), 2),
        "vocabulary_s": round(vocabulary_s, 2),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    print(json.dumps(measure(parser.parse_args().schemas)))


if __name__ == "__main__":
    main()
