"""docs/speed.md out of the results: ``python -m benchmarks.peers.page`` from the repository's root.

A section for each machine, a table for each shape. A column holds one run, the newest that has this
cell, so that its ratios are of figures that were taken in turns.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.peers.engines import ENGINES
from benchmarks.peers.grid import CELLS
from benchmarks.peers.paths import REPOSITORY, RESULTS
from benchmarks.peers.table import rate, row

PAGE = REPOSITORY / "docs" / "speed.md"
_HEAD = """# Beside peers

Tokens per second with random weights of a model's shape, medians, engines in turns in one run
([how](../benchmarks/peers/README.md)). *Prefill 512* is a prompt of 512 tokens, *decode 8* eight
sequences at once. Machines are virtual, with two cores, and others use their memory, whose rate in
each run stands below: compare within a column, which is one run.
`python -m benchmarks.peers.page` makes this page.

Bits per weight, head included: Ridgeline int4 4.83 (KV in int8), llama.cpp Q4_0 with its head in
Q6_K 5.0; OpenVINO's int4 has an int8 head.
"""
_SHAPES = {"llama-3.2-1b": "Llama-3.2-1B", "qwen2.5-0.5b": "Qwen2.5-0.5B"}


def page(results: Iterable[Mapping[str, Any]]) -> str:
    """The page of some results, each with the name of its ``file``."""
    machines: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for result in sorted(results, key=lambda each: each["date"], reverse=True):
        machines[result["machine"]][result["shape"]].append(result)
    lines = [_HEAD.rstrip()]
    for machine, shapes in machines.items():
        lines += ["", f"## {machine}"]
        for shape in sorted(shapes):
            lines += ["", *_table(_SHAPES[shape], shapes[shape])]
    return "\n".join(lines).rstrip() + "\n"


def _table(title: str, newest_first: list[Mapping[str, Any]]) -> list[str]:
    cells = [cell.name for cell in CELLS if any(_has(run, cell.name) for run in newest_first)]
    lines = [row(title, cells), "|---" * (len(cells) + 1) + "|"]
    for weights in dict.fromkeys(engine.weights for engine in ENGINES):
        ours = next(each.name for each in ENGINES if each.weights == weights and each.is_ours)
        peers = [each.name for each in ENGINES if each.weights == weights and not each.is_ours]
        runs = [next((r for r in newest_first if _rate(r, ours, cell)), None) for cell in cells]
        columns = [
            {name: run and _rate(run, name, cell) for name in (ours, *peers)}
            for run, cell in zip(runs, cells, strict=True)
        ]
        for name in (ours, *peers):
            if any(column[name] for column in columns):
                lines.append(row(name, [rate(column[name]) for column in columns]))
        if any(runs):
            lines.append(row("× the best peer", [_ratio(each, ours, peers) for each in columns]))
            lines.append(row("measured on", [_link(run) for run in runs]))
    return lines


def _ratio(column: Mapping[str, float | None], ours: str, peers: list[str]) -> str:
    best = max(column[peer] or 0.0 for peer in peers)
    ratio = (column[ours] or 0.0) / best if best else 0.0
    return f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}" if ratio else "–"


def _has(run: Mapping[str, Any], cell: str) -> bool:
    return any(cell in found for found in run["figures"].values())


def _rate(result: Mapping[str, Any], engine: str, cell: str) -> float | None:
    found: float | None = result["figures"].get(engine, {}).get(cell, {}).get("median_tok_s")
    return found


def _link(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "–"
    memory = result["ceilings"]["read"]["DRAM"].values()
    best = max(each["bytes_per_s"] for each in memory) / 1e9
    path = f"../benchmarks/results/{result['file']}"
    return f"[{result['date'][5:10]}]({path}), {best:.0f} GB/s"


def load_results() -> list[dict[str, Any]]:
    """All results of `run` that are kept, each with the name of its file."""
    paths = [path for shape in _SHAPES for path in RESULTS.glob(f"20*-{shape}*.json")]
    return [{**json.loads(path.read_text()), "file": path.name} for path in sorted(paths)]


if __name__ == "__main__":
    PAGE.write_text(page(load_results()))
