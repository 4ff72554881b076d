"""``ridgeline profile``: where the seconds of a step go, op by op."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.bench import print_experts, shape_config
from ridgeline.cli.display import loading_bar, output_console
from ridgeline.cli.options import Parser, add_model_options, engine_settings
from ridgeline.cli.report_file import check_new_files
from ridgeline.core.errors import DiskError, InvalidRequestError

_SHOWN_FUSIONS = 6


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument(
        "--shape", metavar="NAME", help="random weights of a published shape: llama-3.2-1b"
    )
    for name, default, text in (
        ("prompt", 0, "profile the computation of a prompt of N tokens; default: decode steps"),
        ("batch", 1, "sequences of a decode step"),
        ("context", 0, "tokens behind a decode step"),
        ("steps", 16, "steps to record in a round"),
        ("rounds", 3, "rounds, each with the ceilings and steps that are not recorded"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--per-layer", action="store_true", help="a row for each op of each layer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a step as a flame bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Profile, then print a table or one JSON object, and write what was asked for."""
    config = shape_config(arguments, engine_settings(arguments))
    for name, least in (("prompt", 0), ("batch", 1), ("context", 0), ("steps", 1), ("rounds", 1)):
        if getattr(arguments, name) < least:
            raise InvalidRequestError(f"--{name} must be at least {least}.")
    check_new_files([arguments.trace, arguments.svg])
    from ridgeline.bench.profiling import ProfileCase, profile_engine  # torch takes a second
    from ridgeline.roofline.profile_trace import chrome_trace, flame_svg

    case = ProfileCase(
        prompt_tokens=arguments.prompt, batch=arguments.batch, context=arguments.context
    )
    with loading_bar(of_bytes=False) as progress:
        report = profile_engine(
            config,
            case,
            num_plans=arguments.steps,
            rounds=arguments.rounds,
            by_layer=arguments.per_layer,
            progress=progress,
        )
    result = report.to_json()
    title = f"{report.model} · {report.executor} · {report.dtype} · {case.name}"
    if arguments.trace is not None:
        _write(arguments.trace, json.dumps(chrome_trace(report.steps, title=title)))
    if arguments.svg is not None:
        _write(arguments.svg, flame_svg(report.profile, title=title))
    if arguments.json:
        print(json.dumps(result))
    else:
        print_profile(output_console(), title, result)
    return 0


def print_profile(console: Console, title: str, result: dict[str, Any]) -> None:
    """A table of the ops of a step, where the rest went, and what could be fused."""
    step_s = result["seconds"]
    console.print(f"{title} · {step_s * 1e3:,.3f} ms a step")
    table = Table(box=None)
    for column in ("op", "n", "ms", "share", "wait", "serial", "MB", "GB/s", "of", "GFLOP/s", "of"):
        table.add_column(column, justify="left" if column == "op" else "right", no_wrap=True)
    for row in result["ops"]:
        layer = "" if row["layer"] is None else f" {row['layer']}"
        table.add_row(
            row["name"] + layer,
            f"{row['count']:.0f}",
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['share']:.1%}",
            f"{row['wait_s'] * 1e3:.3f}",
            f"{row['serial_s'] * 1e3:.3f}",
            f"{row['num_bytes'] / 1e6:,.1f}",
            f"{row['bytes_per_s'] / 1e9:.1f}",
            _part(row["bytes_per_s"], row["ceiling_bytes_per_s"]),
            f"{row['flops_per_s'] / 1e9:,.0f}",
            _part(row["flops_per_s"], row["ceiling_flops_per_s"]),
        )
    for name, key in (("(host)", "host_s"), ("(between steps)", "gap_s")):
        table.add_row(name, "", f"{result[key] * 1e3:.3f}", f"{result[key] / step_s:.1%}")
    console.print(table)
    parts = ", ".join(f"{result[f'{k}_s'] / step_s:.1%} {k}" for k in ("work", "wait", "serial"))
    console.print(
        f"Threads: {parts}. All rows are {result['sum_s'] / step_s:.1%} of the "
        f"{result['num_steps']} steps; without recording one takes "
        f"{result['unrecorded_s'] * 1e3:,.3f} ms."
    )
    for each in result["fusion_candidates"][:_SHOWN_FUSIONS]:
        moved = f", {each['num_bytes'] / 1e6:.2f} MB less" if each["num_bytes"] else ""
        console.print(
            f"  fuse {each['first']} + {each['second']}: {each['seconds'] * 1e6:,.1f} µs a step"
            f"{moved}, gaps {each['gap_s'] * 1e6:,.1f} µs",
            markup=False,
        )
    print_experts(console, result["experts"])
    conditions = (result["ceilings"] or {}).get("conditions", {})
    if conditions.get("contended"):
        console.print(
            f"Other processes took {conditions['others_share']:.0%} of the processors.",
            style="yellow",
        )


def _part(rate: float, ceiling: float | None) -> str:
    return f"{rate / ceiling:.0%}" if ceiling and rate else ""


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}.") from error
