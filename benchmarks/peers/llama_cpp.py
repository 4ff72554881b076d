"""llama.cpp, measured by its own ``llama-bench`` and ``llama-batched-bench``.

These give the mean of a run. Decode cells are the median of three runs of 16 steps, after a
warm-up.
"""

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.grid import Cell, Setting
from benchmarks.peers.models import gguf_file
from benchmarks.peers.paths import LLAMA_CPP_TOOLS

_DECODE_STEPS, _RUNS = 16, 3
_START_TOKENS = 16  # llama-batched-bench wants some


def measure(shape: str, setting: Setting, cells: Sequence[Cell], cores: int) -> dict[str, float]:
    """Tokens per second of each cell, by name."""
    model = gguf_file(shape, setting["form"])
    threads = str(max(1, cores - setting.get("cores_left", 0)))
    common = ["-m", str(model), "-t", threads, "-fa", setting["flash"]]
    if "ubatch" in setting:
        common += ["-ub", str(setting["ubatch"])]
    if "kv" in setting:
        common += ["-ctk", setting["kv"], "-ctv", setting["kv"]]
    rates: dict[str, float] = {}
    decodes = [cell for cell in cells if cell.kind == "decode"]
    if decodes:
        rates |= _decode(common, decodes)
    for cell in cells:
        if cell.kind == "prefill":
            (run,) = _lines("llama-bench", [*common, "-p", str(cell.tokens), "-n", "0", "-r", "1"])
            rates[cell.name] = run["avg_ts"]
        elif cell.kind == "long":
            steps, depth = ["-p", "0", "-n", str(_DECODE_STEPS)], ["-d", str(cell.tokens)]
            (run,) = _lines("llama-bench", [*common, *steps, *depth, "-r", str(_RUNS)])
            rates[cell.name] = statistics.median(run["samples_ts"])
    return rates


def _decode(common: Sequence[str], cells: Sequence[Cell]) -> dict[str, float]:
    batches = [cell.batch for cell in cells]
    context = _START_TOKENS + max(batches) * (_DECODE_STEPS + _START_TOKENS)
    flags = ["-npp", str(_START_TOKENS), "-pps", "-ntg", str(_DECODE_STEPS), "-c", str(context)]
    parallel = ["-npl", ",".join(str(batch) for batch in batches for _ in range(_RUNS))]
    runs = _lines("llama-batched-bench", [*common, *flags, *parallel, "--output-format", "jsonl"])
    return {
        cell.name: statistics.median(run["speed_tg"] for run in runs if run["pl"] == cell.batch)
        for cell in cells
    }


def _lines(tool: str, flags: Sequence[str]) -> list[dict[str, Any]]:
    command: list[str | Path] = [LLAMA_CPP_TOOLS / tool, *flags]
    if tool == "llama-bench":
        command += ["-o", "jsonl"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
