"""`ridgeline serve` under load, beside llama.cpp's ``llama-server`` with a GGUF of the same model.

    python -m benchmarks.serving_load users    # 7 minutes: 200 streaming users for 2 minutes each
    python -m benchmarks.serving_load batch    # 4 minutes: HTTP streaming against the engine alone

From the repository's root, after ``python -m benchmarks.peers.install llama_cpp``. One native
client (`load_client.cpp`, built below ``build/``) makes the load for both servers. Results go to
``benchmarks/results/serving-load-CASE-DATE.json``, with the share of the processors that others
took.

``users``: the embedded model, distinct prompts of 32 tokens, 64 tokens of output, greedy. Each
server first runs shortly with each of a few settings, then with the fastest for the whole time.
``batch``: the 1B shape, random weights in int4, 32 sequences that begin together: output tokens/s
of `LLM.generate` and over HTTP, in turns.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.embedded_gguf import embedded_folder, export_embedded
from benchmarks.peers.paths import LLAMA_CPP_TOOLS, PEERS, REPOSITORY, RESULTS
from benchmarks.shapes import shape_folder
from ridgeline import LLM, SamplingParams
from ridgeline.bench.conditions import Watch
from ridgeline.core.host import usable_cores
from ridgeline.roofline.metrics import percentile

PORT = 8391
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
NUM_PROMPTS, NUM_CHECKED = 8192, 128
# The same values in formats that compute at different speeds; nothing is quantized. No prompt
# comes again, and nobody's caches of prompts are on.
OURS = [
    {"dtype": dtype, "max_num_seqs": n, "enable_prefix_caching": False}
    for dtype in ("auto", "float32")
    for n in (64, 200)
]
THEIRS = [{"form": form, "slots": n} for form in ("BF16", "F16", "F32") for n in (64, 200)]
BATCH, BATCH_OUTPUT_TOKENS = 32, 64
Exchange = dict[str, Any]


def load_client() -> Path:
    """The native client, compiled if it is not there or older than its source."""
    source, binary = Path(__file__).with_name("load_client.cpp"), REPOSITORY / "build/load_client"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        binary.parent.mkdir(exist_ok=True)
        subprocess.run(["c++", "-std=c++17", "-O2", "-o", binary, source], check=True)
    return binary


class Server:
    """A server in a process of its own; ``ridgeline serve`` has its engine in a second one."""

    def __init__(self, command: Sequence[str | Path], ready: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        words = [str(word) for word in command]
        self._process = subprocess.Popen(words, stdout=self._log, stderr=self._log)
        for _ in range(1200):
            time.sleep(0.1)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}{ready}").close()
                return
            except OSError:
                if self._process.poll() is not None:
                    self._log.seek(0)
                    raise RuntimeError(self._log.read().decode()[-2000:]) from None
        raise RuntimeError("the server is not ready after two minutes")

    def processes(self) -> dict[str, psutil.Process]:
        """The front by the name ``api``, and the largest of its children as ``engine``."""
        front = psutil.Process(self._process.pid)
        children = sorted(front.children(), key=lambda child: child.memory_info().rss)
        return {"api": front} | ({"engine": children[-1]} if children else {})

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


@contextmanager
def served(command: Sequence[str | Path], ready: str) -> Iterator[Server]:
    """The server until the block ends."""
    server = Server(command, ready)
    try:
        yield server
    finally:
        server.close()


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def run_load(
    server: Server, bodies: Path, *, users: int, seconds: float
) -> tuple[list[Exchange], dict[str, Any]]:
    """Every exchange, and the processor seconds of the client and of each process."""
    processes = server.processes()
    before = {name: cpu_s(process) for name, process in processes.items()}
    command = [str(load_client()), str(PORT), str(users), str(seconds), str(bodies)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *exchanges, client = map(json.loads, output.splitlines())
    cpu = {name: cpu_s(process) - before[name] for name, process in processes.items()}
    memory = {name: process.memory_info().rss for name, process in processes.items()}
    return exchanges, {"cpu_s": cpu, "rss_bytes": memory, "client": client}


def summary(
    exchanges: Sequence[Exchange], usage: dict[str, Any], seconds: float, output_tokens: int
) -> dict[str, Any]:
    """Rates within ``seconds``, latencies and processor time over all exchanges."""
    good = [each for each in exchanges if is_complete(each, output_tokens)]
    bad = [each for each in exchanges if not is_complete(each, output_tokens)]
    problems = Counter(each["error"] or "incomplete" for each in bad)
    if not good:
        raise RuntimeError(f"no request was complete: {dict(problems)}")
    events = sum(each["events"] for each in good)
    tokens = sum(each["tokens"] for each in good)
    in_time = sum(each["tokens"] * each["events_in_time"] / each["events"] for each in good)
    ttfts = sorted(each["first_s"] - each["start_s"] for each in good)
    gaps = sorted(each["longest_gap_s"] for each in good)
    tpots = sorted((each["last_s"] - each["first_s"]) / (each["tokens"] - 1) for each in good)
    return {
        "requests": len(exchanges),
        "complete": len(good),
        "problems": dict(problems),
        "output_tok_s": in_time / seconds,
        "tokens_per_event": tokens / events,
        "ttft_s": {f"p{share}": percentile(ttfts, share / 100) for share in (50, 90, 99)},
        "tpot_s": {f"p{share}": percentile(tpots, share / 100) for share in (50, 99)},
        "longest_gap_p99_s": percentile(gaps, 0.99),
        "cpu_us_per_token": {
            name: value * 1e6 / tokens
            for name, value in (*usage["cpu_s"].items(), ("client", usage["client"]["cpu_s"]))
        },
        "rss_mib": {name: value >> 20 for name, value in usage["rss_bytes"].items()},
    }


def is_complete(exchange: Exchange, output_tokens: int) -> bool:
    """Whether a stream ended as it should, with all its tokens."""
    ended = exchange["is_done"] and exchange["finish"] == "length" and not exchange["error"]
    return bool(ended and exchange["tokens"] == output_tokens and exchange["events"])


def prompts_of_heldout() -> list[str]:
    """Distinct pieces of text that the embedded model was not trained on."""
    source = embedded_folder().with_name("heldout") / "heldout.jsonl"
    text = "".join(json.loads(line)["text"] for line in source.read_text().splitlines())
    with LLM() as llm:
        ids = llm.tokenizer.encode(text) if llm.tokenizer else []
        starts = random.Random(0).sample(range(len(ids) - PROMPT_TOKENS), NUM_PROMPTS)
        pieces = [ids[start : start + PROMPT_TOKENS] for start in starts]
        return [llm.tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]


def ours(setting: dict[str, Any], folder: Path) -> list[str]:
    """The command that serves the embedded model."""
    own = ["--port", str(PORT), "--data-dir", str(folder / "data"), "--no-log-requests"]
    return [sys.executable, "-m", "ridgeline", "serve", *own, *flags(setting)]


def flags(setting: dict[str, Any]) -> list[str]:
    """Settings as the command line spells them."""
    words = []
    for name, value in setting.items():
        spelled = name.replace("_", "-")
        words += [f"--no-{spelled}"] if value is False else [f"--{spelled}", str(value)]
    return words


def theirs(setting: dict[str, Any], folder: Path) -> list[str]:
    """The command that serves it with llama.cpp: a slot for each sequence, its caches off."""
    model = folder / f"{setting['form']}.gguf"
    if not model.exists():
        export_embedded(model, setting["form"])
    slots = setting["slots"]
    context = slots * 2 * (PROMPT_TOKENS + OUTPUT_TOKENS)
    return [
        str(LLAMA_CPP_TOOLS / "llama-server"), "-m", str(model), "--port", str(PORT),
        "-np", str(slots), "-c", str(context), "-t", str(usable_cores()), "-fa", "on",
        "--threads-http", "208", "--cache-ram", "0", "--no-webui",
    ]  # fmt: skip


def users(arguments: argparse.Namespace) -> dict[str, Any]:
    """So many users on each server, at the fastest of its settings."""
    texts = prompts_of_heldout()
    results: dict[str, Any] = {"users": arguments.users, "seconds": arguments.seconds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bodies = folder / "bodies.jsonl"
        bodies.write_text("\n".join(completion(prompt=text) for text in texts) + "\n")
        for engine, command, grid, ready in (
            ("ridgeline", ours, OURS, "/ready"),
            ("llama-server", theirs, THEIRS, "/health"),
        ):
            if engine not in arguments.engines:
                continue
            tried = []
            for setting in grid:
                figures, _ = measure(
                    command(setting, folder), ready, bodies, arguments.users, arguments.tune_seconds
                )
                tried.append({"setting": setting, "output_tok_s": figures["output_tok_s"]})
                print(engine, json.dumps(tried[-1]), flush=True)
            best = max(tried, key=lambda each: each["output_tok_s"])["setting"]
            figures, exchanges = measure(
                command(best, folder), ready, bodies, arguments.users, arguments.seconds
            )
            alone = offline(texts[:NUM_CHECKED], best.get("dtype", "auto"))
            checked = [each for each in exchanges if each["body"] < NUM_CHECKED]
            equal = sum(each["text"] == alone[each["body"]] for each in checked)
            figures |= {"setting": best, "tried": tried}
            figures["texts_equal_to_offline"] = f"{equal} of {len(checked)}"
            results[engine] = figures
    if len(arguments.engines) == 2:
        rates = [results[engine]["output_tok_s"] for engine in ("ridgeline", "llama-server")]
        results["ratio"] = rates[0] / rates[1]
    return results


def offline(texts: list[str], dtype: str) -> list[str]:
    """What `LLM` says after each of the texts."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with LLM(dtype=dtype) as llm:
        return [output.outputs[0].text for output in llm.generate(texts, params)]


def measure(
    command: Sequence[str], ready: str, bodies: Path, count: int, seconds: float
) -> tuple[dict[str, Any], list[Exchange]]:
    """A fresh server under so many users."""
    with served(command, ready) as server:
        exchanges, usage = run_load(server, bodies, users=count, seconds=seconds)
    return summary(exchanges, usage, seconds, OUTPUT_TOKENS), exchanges


def completion(**fields: Any) -> str:
    """A request as both servers read it."""
    settings = {"temperature": 0, "ignore_eos": True, "max_tokens": OUTPUT_TOKENS}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**settings, **stream, **fields})


def batch(arguments: argparse.Namespace) -> dict[str, Any]:
    """32 sequences that begin together: the engine alone, and over HTTP, in turns."""
    rng = random.Random(1)
    with shape_folder("llama-3.2-1b") as folder:
        settings = {
            "load_format": "dummy", "quantization": "int4", "max_model_len": 256,
            "packed_cache_path": str(PEERS / "packed"), "enable_prefix_caching": False,
        }  # fmt: skip
        prompts = [rng.choices(range(10, 4000), k=PROMPT_TOKENS) for _ in range(BATCH)]
        bodies = folder / "bodies.jsonl"
        lines = [completion(prompt=prompt, max_tokens=BATCH_OUTPUT_TOKENS) for prompt in prompts]
        bodies.write_text("\n".join(lines) + "\n")
        params = SamplingParams(temperature=0.0, max_tokens=BATCH_OUTPUT_TOKENS, ignore_eos=True)
        alone: list[float] = []
        http: list[dict[str, Any]] = []
        command = [*ours(settings, folder), str(folder)]
        with LLM(str(folder), **settings) as llm, served(command, "/ready") as server:
            for round_number in range(arguments.rounds + 1):  # the first is not counted
                began_s = time.perf_counter()
                llm.generate(prompts, params)
                seconds = time.perf_counter() - began_s
                exchanges, usage = run_load(server, bodies, users=BATCH, seconds=0)
                wall_s = max(each["last_s"] for each in exchanges)
                summed = summary(exchanges, usage, wall_s, BATCH_OUTPUT_TOKENS)
                if summed["complete"] != BATCH:
                    raise RuntimeError(f"{summed['problems']} of {BATCH} requests")
                if round_number:
                    alone.append(BATCH * BATCH_OUTPUT_TOKENS / seconds)
                    http.append(summed)
                print("alone", BATCH * BATCH_OUTPUT_TOKENS / seconds)
                print("over HTTP", summed["output_tok_s"], flush=True)
    rates = [each["output_tok_s"] for each in http]
    return {
        "sequences": BATCH,
        "engine_tok_s": alone,
        "http_tok_s": rates,
        "ratio": statistics.median(rates) / statistics.median(alone),
        "http": http[-1],
    }


def main() -> None:
    """Run one case; its figures go to the terminal and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=["users", "batch"])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tune-seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engines", nargs="*", default=["ridgeline", "llama-server"])
    arguments = parser.parse_args()
    load_client()
    watch = Watch()
    results = {"users": users, "batch": batch}[arguments.case](arguments)
    results["conditions"] = watch.conditions(threads=usable_cores())
    path = RESULTS / f"serving-load-{arguments.case}-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
