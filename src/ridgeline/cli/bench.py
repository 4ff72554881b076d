"""``ridgeline bench``: how fast an executor's steps are, beside what the machine allows."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import loading_bar, output_console
from ridgeline.cli.options import Parser, add_model_options, engine_settings, numbers
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.core.errors import InvalidRequestError


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument(
        "--shape", metavar="NAME", help="random weights of a published shape: llama-3.2-1b"
    )
    for name, default, least, text in (
        ("prompt", (512,), 1, "prompt lengths; empty for none"),
        ("batch", (1, 8, 32), 1, "sequences of a decode step; empty for none"),
        ("context", (0,), 0, "tokens behind a decode step"),
    ):
        kind = numbers(least, may_be_empty=True)
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N,N", help=text)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="visits of each case")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, then print a table or one JSON object."""
    settings = engine_settings(arguments)
    if arguments.rounds < 1:
        raise InvalidRequestError("--rounds must be at least 1.")
    config = shape_config(arguments, settings)
    from ridgeline.bench.cases import make_cases
    from ridgeline.bench.executor_bench import bench_executor  # torch takes a second

    cases = make_cases(
        arguments.prompt, arguments.batch, arguments.context, reuse_kv=config.reuse_kv
    )
    with loading_bar(of_bytes=False) as progress:
        report = bench_executor(config, cases, rounds=arguments.rounds, progress=progress)
    result = report.to_json()
    if arguments.json:
        print(json.dumps(result))
    else:
        print_report(result)
    return 0


def print_report(result: Mapping[str, Any]) -> None:
    """A table of the cases, and the ceilings under it."""
    console = output_console()
    bits = result["bits_per_weight"]
    console.print(f"{result['model']} · {result['executor']} · {result['dtype']} · "
                  f"{bits:.2f} bits per weight")  # fmt: skip
    table = Table(box=None)
    for column in ("case", "tok/s", "ms", "predicted", "MFU", "MBU", "bound"):
        table.add_column(column, justify="left" if column in ("case", "bound") else "right")
    for case in result["cases"]:
        rate = case["prefill_tok_s"] or case["decode_tok_s"]
        shares = (f"{case['mfu']:.1%}", f"{case['mbu']:.1%}")
        milliseconds = f"{case['measured_s'] * 1e3:.2f}"
        predicted = f"{case['predicted_s'] * 1e3:.2f}"
        table.add_row(case["name"], f"{rate:,.1f}", milliseconds, predicted, *shares, case["bound"])
    console.print(table)
    for row in result["kv_reuse"]:
        console.print(
            f"KV reuse at {row['context']}: a token comes {row['ratio']:.1f} times as fast "
            f"(predicted {row['predicted_ratio']:.1f})."
        )
    print_experts(console, result["experts"])
    if result["predicted_by"] == "roof":
        console.print(
            "Predicted is the least that the ceilings allow: this machine is not calibrated "
            "(ridgeline roofline --calibrate).",
            style="dim",
        )
    else:
        for text in (f"Predicted by a model {result['calibration']}.", *result["past_errors"]):
            console.print(text, style="dim", markup=False)
    if result["contradiction"]:
        console.print(result["contradiction"], style="yellow", markup=False)
    energies = [case for case in result["cases"] if case["energy_valid"]]
    if energies:
        parts = [f"{case['name']} {case['joules_per_token']:.3g} J" for case in energies]
        console.print(f"Energy of a token ({energies[0]['energy_source']}): {', '.join(parts)}")
    print_ceilings(console, result["ceilings"])


def print_experts(console: Console, experts: Mapping[str, Any] | None) -> None:
    """How tokens were spread over experts, where there are some."""
    if experts is not None:
        console.print(f"{experts['routed_tokens']:,} tokens to {experts['text']}.", markup=False)


def print_ceilings(console: Console, ceilings: Mapping[str, Any]) -> None:
    """Rates of memory and arithmetic, and what disturbed the measurement."""
    for level, by_threads in ceilings["read"].items():
        for threads, entry in by_threads.items():
            who = f"{threads} thread{'' if threads == '1' else 's'}"
            rate = entry["bytes_per_s"] / 1e9
            console.print(f"{level} read, {who}: {rate:.1f} GB/s", style="dim")
    for name, entry in ceilings["arithmetic"].items():
        console.print(f"{name}: {entry['operations_per_s'] / 1e9:,.0f} GFLOP/s", style="dim")
    conditions = ceilings["conditions"]
    if conditions["contended"]:
        console.print(
            f"Other processes took {conditions['others_share']:.0%} of the processors: "
            "these figures are too low.",
            style="yellow",
        )


def shape_config(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration of MODEL, or of ``--shape`` with random weights.

    Raises:
        InvalidRequestError: both are given, or there is no such shape.
    """
    if arguments.shape is None:
        return with_overrides(EngineConfig(model=arguments.model), **settings)
    from ridgeline.models import PRESETS

    if arguments.model is not None:
        raise InvalidRequestError("Give a model or --shape, not both.")
    if arguments.shape not in PRESETS:
        raise InvalidRequestError(
            f"Unknown shape {arguments.shape!r}; choose one of {', '.join(sorted(PRESETS))}."
        )
    config = EngineConfig(model=arguments.shape, load_format="dummy")
    return with_overrides(config, **settings)
