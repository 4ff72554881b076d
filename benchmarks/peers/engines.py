"""Every engine that takes part, Ridgeline included, as one kind of thing to run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers import llama_cpp
from benchmarks.peers.grid import (
    LLAMA_CPP_BF16,
    LLAMA_CPP_INT4,
    OPENVINO_INT4,
    TRANSFORMERS,
    Cell,
    Setting,
)
from benchmarks.peers.models import checkpoint, openvino_folder
from benchmarks.peers.paths import REPOSITORY, peer_python

Measure = Callable[[str, Setting, Sequence[Cell], int], dict[str, float]]
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """``measure(shape, setting, cells, cores)`` gives tokens per second by the cell's name.

    ``weights`` is "int4" or "bf16"; only engines of the same are compared.
    """

    name: str
    weights: str
    grid: Mapping[str, Sequence[Setting]]
    measure: Measure
    is_ours: bool = False


def _worker(script: str, peer: str, folder: Path, setting: Setting, cells: Sequence[Cell],
            cores: int) -> dict[str, float]:  # fmt: skip
    job = {
        "folder": str(folder),
        "threads": max(1, cores - setting.get("cores_left", 0)),
        "setting": dict(setting),
        "cells": [asdict(cell) | {"name": cell.name} for cell in cells],
    }
    command = [str(peer_python(peer)), str(_HERE / script)]
    return _last_json(command, stdin=json.dumps(job))


def _openvino(shape: str, setting: Setting, cells: Sequence[Cell], cores: int) -> dict[str, float]:
    folder = openvino_folder(shape, setting["form"])
    return _worker("openvino_worker.py", "openvino", folder, setting, cells, cores)


def _transformers(
    shape: str, setting: Setting, cells: Sequence[Cell], cores: int
) -> dict[str, float]:
    folder = checkpoint(shape)
    return _worker("transformers_worker.py", "transformers", folder, setting, cells, cores)


def _ridgeline(shape: str, setting: Setting, cells: Sequence[Cell], cores: int) -> dict[str, float]:
    """Our own ``ridgeline bench``: one run for small contexts, one for long ones."""
    del cores  # the executor takes those that it may use
    by_kind: dict[str, list[Cell]] = {"prefill": [], "decode": [], "long": []}
    for cell in cells:
        by_kind[cell.kind].append(cell)
    prompts = [cell.tokens for cell in by_kind["prefill"]]
    batches = [cell.batch for cell in by_kind["decode"]]
    runs = [(prompts, batches, [0])] if prompts or batches else []
    runs += [([], [cell.batch], [cell.tokens]) for cell in by_kind["long"]]
    rates: dict[str, float] = {}
    for run in runs:
        lists = zip(("--prompt", "--batch", "--context"), run, strict=True)
        report = _last_json(
            [
                sys.executable, "-m", "ridgeline", "bench", str(checkpoint(shape)), "--json",
                "--rounds", "1", *_flags(setting),
                *(word for option, numbers in lists for word in _list(option, numbers)),
            ]
        )  # fmt: skip
        for case in report["cases"]:
            rates[case["name"]] = case["prefill_tok_s"] or case["decode_tok_s"]
    return rates


def _flags(setting: Setting) -> list[str]:
    return [word for name, value in setting.items() for word in (f"--{name}", str(value))]


def _list(option: str, numbers: Sequence[int]) -> list[str]:
    return [option, ",".join(map(str, numbers))]


def _last_json(command: Sequence[str], *, stdin: str = "") -> dict:
    """Run a command whose last line of output is a JSON object."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _same(*settings: Setting) -> Mapping[str, Sequence[Setting]]:
    return dict.fromkeys(("prefill", "decode", "long"), settings)


OURS_INT4 = {"executor": "cpu", "quantization": "int4", "kv-cache-dtype": "int8"}
OURS_BF16 = {"executor": "cpu", "quantization": "none", "kv-cache-dtype": "bf16"}

ENGINES = (
    Engine(name="ridgeline int4", weights="int4", grid=_same(OURS_INT4), measure=_ridgeline,
           is_ours=True),
    Engine(name="llama.cpp Q4_0", weights="int4", grid=LLAMA_CPP_INT4, measure=llama_cpp.measure),
    Engine(name="OpenVINO int4", weights="int4", grid=OPENVINO_INT4, measure=_openvino),
    Engine(name="ridgeline bf16", weights="bf16", grid=_same(OURS_BF16), measure=_ridgeline,
           is_ours=True),
    Engine(name="llama.cpp BF16", weights="bf16", grid=LLAMA_CPP_BF16, measure=llama_cpp.measure),
    Engine(name="transformers", weights="bf16", grid=TRANSFORMERS, measure=_transformers),
)  # fmt: skip
