"""A results file as Markdown, for the docs: ``python -m benchmarks.peers.table RESULTS.json``."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown(result: Mapping[str, Any]) -> str:
    """Figures, ratios, ceilings and conditions."""
    figures, ratios = result["figures"], result["ratios"]
    cells = list(next(iter(figures.values())))
    conditions = result["ceilings"]["conditions"]
    lines = [
        f"{result['shape']}, {conditions['cpu']}, {conditions['cores']} cores, "
        f"{result['date'][:10]}, tokens/s, medians. {_ceilings(result['ceilings'])}",
        "",
        "| | " + " | ".join(cells) + " |",
        "|---" * (len(cells) + 1) + "|",
    ]
    lines += [
        row(engine, [rate(found[cell]["median_tok_s"]) for cell in cells])
        for engine, found in figures.items()
    ]
    lines += [
        row(names, [f"{found[cell]:.2f}×" if cell in found else "–" for cell in cells])
        for names, found in ratios.items()
        if found
    ]
    shares = [s for found in figures.values() for f in found.values() for s in f["others_share"]]
    if shares and max(shares) > 0.05:
        lines += ["", f"Other processes took {min(shares):.0%} to {max(shares):.0%} of the "
                      "processors during these measurements."]  # fmt: skip
    errors = {f["error"] for found in figures.values() for f in found.values() if f["error"]}
    lines += ["", *(f"Not measured: {error}" for error in sorted(errors))] if errors else []
    return "\n".join(lines)


def _ceilings(ceilings: Mapping[str, Any]) -> str:
    conditions = ceilings["conditions"]
    memory = ceilings["read"]["DRAM"][str(conditions["threads"])]["bytes_per_s"]
    rates = ", ".join(
        f"{name} {entry['operations_per_s'] / 1e9:,.0f} GFLOP/s"
        for name, entry in ceilings["arithmetic"].items()
    )
    return f"Ceilings: memory {memory / 1e9:.1f} GB/s, {rates}."


def row(name: str, values: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {name} | " + " | ".join(values) + " |"


def rate(value: float | None) -> str:
    """Tokens per second in three digits."""
    return "–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def main() -> None:
    """Print the table of each file that is named."""
    for name in sys.argv[1:]:
        print(markdown(json.loads(Path(name).read_text())))


if __name__ == "__main__":
    main()
