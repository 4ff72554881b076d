"""Documents a second of a core, beside sentence-transformers: the same folder, in turns.

``python -m benchmarks.embeddings FOLDER --peer PYTHON`` from the root of the repository. FOLDER is
a model that sentence-transformers saved, PYTHON an interpreter that has it. Each side is a process
of one thread on the same core; what is compared are documents by seconds of that process'
processor time, which others on the machine disturb least. Both embed the same texts of mixed
lengths, cut to the context, in batches of their own choice (the peer's: sorted by length, 32 at a
time).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

_SPREAD = 0.8  # of the logarithm of a text's length in words
_MEDIAN_LOG_WORDS = 3.6
_MOST_WORDS = 180


def texts(count: int) -> list[str]:
    """Pieces of the documentation, 4 to 180 words, half of them below 37."""
    files = sorted(Path("docs").glob("*.md"))
    words = " ".join(file.read_text(encoding="utf-8") for file in files).split()
    chance = random.Random(7)
    found = []
    for _ in range(count):
        length = int(chance.lognormvariate(_MEDIAN_LOG_WORDS, _SPREAD))
        start = chance.randrange(len(words) - 200)
        found.append(" ".join(words[start : start + min(max(length, 4), _MOST_WORDS)]))
    return found


def work(side: str, folder: str, options: dict[str, str]) -> None:
    """Embed what the first line of standard input has, once for each line after it."""
    wanted = json.loads(sys.stdin.readline())
    if side == "peer":
        import sentence_transformers
        import torch

        dtype = getattr(torch, options.get("dtype", "float32"))
        peer = sentence_transformers.SentenceTransformer(
            folder, device="cpu", model_kwargs={"dtype": dtype}
        )

        def embed() -> None:
            peer.encode(wanted, batch_size=32)
    else:
        from ridgeline import LLM

        llm = LLM(folder, **options)

        def embed() -> None:
            llm.embed(wanted, truncate=-1)

    embed()
    for _ in sys.stdin:
        start = time.process_time()
        embed()
        print(len(wanted) / (time.process_time() - start), flush=True)


def main() -> None:
    """Run all sides in turns and print the median of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--peer", default=sys.executable, help="a Python with the peer")
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        work(arguments.side, arguments.folder, json.loads(arguments.options))
        return
    core = min(os.sched_getaffinity(0))
    sides = {
        "sentence-transformers float32": (arguments.peer, "peer", {}),
        "ridgeline float32": (sys.executable, "own", {}),
        "ridgeline bfloat16": (sys.executable, "own", {"dtype": "bfloat16"}),
        "ridgeline int8": (sys.executable, "own", {"quantization": "int8"}),
    }
    wanted, running, rates = json.dumps(texts(arguments.documents)), {}, {}
    for name, (python, side, options) in sides.items():
        command = [python, __file__, arguments.folder, "--side", side]
        running[name] = subprocess.Popen(
            ["taskset", "-c", str(core), *command, "--options", json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        running[name].stdin.write(wanted + "\n")
        rates[name] = []
    for _ in range(arguments.rounds):
        for name, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            rates[name].append(float(process.stdout.readline()))
    for name, process in running.items():
        process.stdin.close()
        print(f"{name:32} {statistics.median(rates[name]):8.1f} documents a second of a core")


if __name__ == "__main__":
    main()
