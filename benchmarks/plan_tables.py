"""The tables of predictions in docs/roofline.md, as ``ridgeline plan`` makes them.

    python benchmarks/plan_tables.py [--write]

Each row is one call of the command with ``--json``. ``--write`` puts the tables into the page,
where its markers are. Published throughputs are those of TensorRT-LLM's performance overview
(release 1.0: FP8 weights from NVIDIA's hub, the whole load sent at once, total output tokens/s),
for Llama 3.3 70B, which has the shape of 3.1. Those of gpt-oss are from a later release, of the
checkpoint's own MXFP4 and KV in 16 bits.
"""

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline.cli.main import main as ridgeline

PAGE = Path(__file__).resolve().parents[1] / "docs" / "roofline.md"

_LARGE = (  # device, count, devices of a replica, quantization
    ("h100", 8, 4, None),
    ("h100", 8, 8, None),
    ("h100", 8, 4, "fp8"),
    ("h200", 4, 2, None),
    ("h200", 4, 4, None),
    ("h200", 4, 2, "fp8"),
)
_SMALL = (None, "fp8", "int4")
_PUBLISHED = (  # shape, device, devices of a replica, prompt, output, output tokens/s
    ("llama-3.1-70b", "h100", 2, 1000, 1000, 4205),
    ("llama-3.1-70b", "h100", 2, 2048, 128, 762),
    ("llama-3.1-70b", "h200", 1, 1000, 1000, 2909),
    ("llama-3.1-70b", "h200", 1, 2048, 128, 442),
    ("llama-3.1-8b", "h100", 1, 1000, 1000, 15220),
    ("llama-3.1-8b", "h100", 1, 2048, 128, 3450),
    ("llama-3.1-8b", "h200", 1, 1000, 1000, 17744),
    ("llama-3.1-8b", "h200", 1, 2048, 128, 3538),
    ("gpt-oss-20b", "h100", 1, 1000, 1000, 11557),
    ("gpt-oss-20b", "h100", 1, 8192, 1024, 3366),
    ("gpt-oss-120b", "h200", 1, 1000, 1000, 6868),
    ("gpt-oss-120b", "h200", 1, 8192, 1024, 1828),
)


def plan(*options: object) -> dict[str, Any]:
    """What ``ridgeline plan`` prints."""
    print("plan", *options, file=sys.stderr, flush=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = ridgeline(["plan", *map(str, options), "--json"])
    assert code == 0, options
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def _quantized(name: str | None) -> tuple[str, ...]:
    return () if name is None else ("--quantization", name)


def _span(result: dict[str, Any], name: str, scale: float, digits: int) -> str:
    low, high = result["interval_80"][name]
    value, low, high = (each * scale for each in (result[name], low, high))
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _speeds(result: dict[str, Any]) -> str:
    return (
        f"{result['max_batch']:,} | {_span(result, 'ttft_s', 1e3, 0)} | "
        f"{_span(result, 'tpot_s', 1e3, 1)} | {_span(result, 'output_tok_s', 1, 0)} | "
        f"{result['usd_per_1m_output']:.2f}"
    )


def large() -> list[str]:
    """Llama-3.1-70B, 1,000 tokens in and 200 out."""
    lines = [
        "| machine | weights | replicas | sequences | TTFT ms | TPOT ms | output tok/s | $/1M |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for device, count, ranks, quantization in _LARGE:
        result = plan(
            "--shape", "llama-3.1-70b", "--hardware", device, "--count", count, "-tp", ranks,
            "--prompt", 1000, "--output", 200, *_quantized(quantization),
        )  # fmt: skip
        lines.append(
            f"| {count} × {device.upper()} | {quantization or 'bfloat16'} | "
            f"{result['replicas']} × tp {ranks} | {_speeds(result)} |"
        )
    return lines


def small() -> list[str]:
    """Llama-3.1-8B on one L4, 1,000 tokens in and 200 out."""
    lines = [
        "| weights | sequences | TTFT ms | TPOT ms | output tok/s | $/1M |",
        "|---|---|---|---|---|---|",
    ]
    for quantization in _SMALL:
        result = plan(
            "--shape", "llama-3.1-8b", "--hardware", "l4", "--prompt", 1000, "--output", 200,
            *_quantized(quantization),
        )  # fmt: skip
        lines.append(f"| {quantization or 'bfloat16'} | {_speeds(result)} |")
    return lines


def published() -> list[str]:
    """Predicted beside published throughput; of Llama, with FP8 weights and KV."""
    lines = [
        "| model | machine | in, out | published tok/s | predicted (80 %) | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for shape, device, ranks, prompt, output, measured in _PUBLISHED:
        fp8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
        result = plan(
            "--shape", shape, "--hardware", device, "--count", ranks, "-tp", ranks,
            "--max-num-seqs", 1024, "--max-num-batched-tokens", 8192, "--prompt", prompt,
            "--output", output, *(fp8 if shape.startswith("llama") else ()),
        )  # fmt: skip
        lines.append(
            f"| {shape} | {ranks} × {device.upper()} | {prompt:,}, {output:,} | {measured:,} | "
            f"{_span(result, 'output_tok_s', 1, 0)} | {result['output_tok_s'] / measured:.2f} |"
        )
    return lines


TABLES = {"large": large, "small": small, "published": published}


def write(page: Path, tables: dict[str, Sequence[str]]) -> None:
    """Put each table between its markers, ``<!-- plan NAME -->`` and ``<!-- end -->``."""
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        first, last = f"<!-- plan {name} -->", "<!-- end -->"
        before, found, rest = text.partition(first)
        assert found, f"{page} has no table {name!r}"
        text = "\n".join([before + first, *lines, last + rest.partition(last)[2]])
    page.write_text(text, encoding="utf-8")


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/roofline.md")
    arguments = parser.parse_args()
    tables = {name: make() for name, make in TABLES.items()}
    if arguments.write:
        write(PAGE, tables)
    for lines in tables.values():
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
