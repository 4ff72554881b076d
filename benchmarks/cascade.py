"""A small model before a large one: what it costs, and how often it is right.

    ridgeline serve embedded --port 8001
    ridgeline serve src/ridgeline/assets/draft --port 8002
    python -m benchmarks.cascade --large http://127.0.0.1:8001 --small http://127.0.0.1:8002

Held-out code and prose of the embedded model is cut at words; right is who goes on with the next
words of the text. One half of the requests finds the threshold, the other says what comes of it.
"""

import argparse
import asyncio
import json
import random
import re

from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.evaluation.texts import heldout_texts
from ridgeline.fleet.cascade_calibration import ask_pairs, at_threshold, cascade_threshold

_WORD = re.compile(r"(?<=\w)\s+(?=\w)")
_PROMPT_CHARS = (150, 500)
_ANSWER_TOKENS = 4


def sample(count: int, words: int, seed: int = 0) -> list[dict[str, object]]:
    """Requests, each with the words that come next in the text."""
    rng, texts, found = random.Random(seed), heldout_texts(), list[dict[str, object]]()
    while len(found) < count:
        text = rng.choice(texts)
        at = rng.randrange(_PROMPT_CHARS[1], max(_PROMPT_CHARS[1] + 1, len(text) - 100))
        gap = _WORD.search(text, at)
        if gap is None:
            continue
        begin = gap.start() - rng.randint(*_PROMPT_CHARS)
        expected = " ".join(text[gap.end() :].split()[:words])
        found.append(
            {
                "prompt": text[max(0, begin) : gap.start()],
                "expected": expected,
                "temperature": 0.0,
                "max_tokens": _ANSWER_TOKENS,
            }
        )
    return found


def main() -> None:
    """Print a line for each risk, and all as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--words", type=int, default=1)
    parser.add_argument("--risks", default="0.02,0.05,0.1,0.2")
    arguments = parser.parse_args()
    small, large = (HttpTarget(url, model="") for url in (arguments.small, arguments.large))
    pairs = asyncio.run(ask_pairs(sample(arguments.requests, arguments.words), small, large))
    half = len(pairs) // 2
    rows = []
    for risk in map(float, arguments.risks.split(",")):
        found = cascade_threshold(pairs[:half], risk)
        row = {"risk": risk, **at_threshold(pairs[half:], found.threshold).told()}
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
