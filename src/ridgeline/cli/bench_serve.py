"""``ridgeline bench serve``: latency, throughput and goodput under load."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import loading_bar
from ridgeline.cli.options import Parser, add_model_options, engine_settings, numbers, positive
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from ridgeline.bench.serve.session import Point

_MAX_VOCAB = 1000  # ids that any vocabulary has
_LEAST = {
    "num_requests": 1,
    "prefix_len": 0,
    "num_prefixes": 1,
    "turns": 1,
    "think_s": 0,  # NaN is within no bounds
    "warmup": 0,
}
_MOST = 1_000_000


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "bench-serve", prog="ridgeline bench serve", help="measure an engine or a URL under load"
    )
    add_model_options(parser)
    target = parser.add_argument_group("target")
    target.add_argument("--url", help="OpenAI-compatible server, instead of an engine here")
    target.add_argument("--model-name", metavar="NAME", help="model to ask the server for")
    target.add_argument("--api-key", metavar="KEY")
    target.add_argument("--in-process", action="store_true", help="engine in this process")
    load = parser.add_argument_group("load").add_mutually_exclusive_group()
    load.add_argument("--rate", type=_rates, metavar="R,R", help="Poisson arrivals per second")
    load.add_argument(
        "--concurrency", type=numbers(), metavar="N,N", help="requests at once (closed)"
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines of arrivals, lengths")
    work = parser.add_argument_group("requests")
    work.add_argument("--num-requests", type=int, default=100, metavar="N", help="or conversations")
    forms = "N, uniform:A:B, lognormal:MEDIAN:SIGMA:MAX, bimodal:A:B:SHARE"
    work.add_argument("--input-len", type=_length, default="128", metavar="DIST", help=forms)
    work.add_argument("--output-len", type=_length, default="64", metavar="DIST")
    work.add_argument("--prefix-len", type=int, default=0, metavar="N", help="shared tokens before")
    work.add_argument("--num-prefixes", type=int, default=1, metavar="N")
    work.add_argument("--turns", type=int, default=1, metavar="N", help="per conversation")
    work.add_argument("--think-s", type=float, default=0.0, metavar="S", help="between turns")
    work.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before")
    slo = parser.add_argument_group("limits of good requests, milliseconds")
    for name in ("ttft", "tpot", "e2e"):
        slo.add_argument(f"--{name}-slo", type=positive, metavar="MS")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write SVG plots there")
    parser.add_argument("--traces", action="store_true", help="with --json: every request, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sweep; print a table or one JSON object. Exit code 1 if every request failed."""
    for name, least in _LEAST.items():
        if not least <= getattr(arguments, name) <= _MOST:
            option = name.replace("_", "-")
            raise InvalidRequestError(f"--{option} must be between {least} and {_MOST:,}.")
    if arguments.plots is not None:
        from ridgeline.bench.serve.plots import require_plots, write_plots

        require_plots()
    name, points = asyncio.run(_run(arguments))
    report: dict[str, Any] = {
        "model": name,
        "seed": _seed(arguments),
        "definitions": "docs/metrics.md",
        "points": [point.to_json(with_traces=arguments.traces) for point in points],
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        print_points(name, report["points"])
    if arguments.plots is not None:
        for path in write_plots(points, arguments.plots, title=name):
            print(path, file=sys.stderr)
    return 1 if all(point.summary.num_failed == len(point.traces) for point in points) else 0


async def _run(arguments: argparse.Namespace) -> "tuple[str, Sequence[Point]]":
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.bench.serve.metrics import Slo
    from ridgeline.bench.serve.session import Load, run_point, warm_up
    from ridgeline.bench.serve.targets import EngineTarget, Target
    from ridgeline.bench.serve.workload import Workload, read_trace
    from ridgeline.engine import AsyncEngine

    milliseconds = {name: getattr(arguments, f"{name}_slo") for name in ("ttft", "tpot", "e2e")}
    limits = {name: None if ms is None else ms / 1e3 for name, ms in milliseconds.items()}
    slo = Slo(ttft_s=limits["ttft"], tpot_s=limits["tpot"], end_to_end_s=limits["e2e"])
    engine: AsyncEngine | None = None
    target: Target
    vocab = range(10, _MAX_VOCAB)
    async with AsyncExitStack() as stack:
        if arguments.url is not None:
            http = HttpTarget(
                arguments.url, model=arguments.model_name or "", api_key=arguments.api_key
            )
            name = arguments.model_name or (await http.models())[0]
            target = http.with_model(name)
        else:
            config = with_overrides(
                EngineConfig(model=arguments.model), **engine_settings(arguments)
            )
            with loading_bar() as progress:
                engine = AsyncEngine(config, in_process=arguments.in_process, progress=progress)
                await stack.enter_async_context(engine)
            name, target = engine.model_name, EngineTarget(engine)
            vocab = range(
                min(10, engine.spec.vocab_size - 1), min(_MAX_VOCAB, engine.spec.vocab_size)
            )
        workload = Workload(
            num_conversations=arguments.num_requests,
            input_length=arguments.input_len,
            output_length=arguments.output_len,
            num_turns=arguments.turns,
            prefix_tokens=arguments.prefix_len,
            num_prefixes=arguments.num_prefixes,
            vocab=vocab,
            seed=_seed(arguments),
        )
        await warm_up(target, workload, arguments.warmup)
        points: list[Point] = []
        for load in _loads(arguments, Load):
            if arguments.trace is not None:
                conversations = read_trace(arguments.trace, vocab=vocab, seed=workload.seed)
            else:
                # Other contents at each load: the cache of one is no help to the next.
                seed = workload.seed + 7919 * len(points)
                conversations = list(workload.at(rate=load.rate, seed=seed).conversations())
            points.append(
                await run_point(
                    target,
                    load,
                    conversations,
                    slo=slo,
                    think_s=arguments.think_s,
                    engine=engine,
                )
            )
        return name, points


def _loads(arguments: argparse.Namespace, load: Any) -> list[Any]:
    if arguments.rate is not None:
        return [load(rate=rate) for rate in arguments.rate]
    if arguments.trace is not None:
        return [load()]
    return [load(concurrency=count) for count in arguments.concurrency or (1,)]


def _seed(arguments: argparse.Namespace) -> int:
    return int(getattr(arguments, "seed", 0))


def print_points(name: str, points: Sequence[Mapping[str, Any]]) -> None:
    """A table with one column for each load, and warnings under it."""
    console = Console(highlight=False)
    console.print(f"{name}: times in ms; a request starts when it was scheduled to be sent")
    table = Table(box=None)
    table.add_column("")
    for point in points:
        table.add_column(_label(point["load"]), justify="right")
    for label, key in (
        ("requests/s offered", "request_rate"),
        ("requests/s completed", "completed_rate"),
        ("requests/s good", "goodput"),
        ("output tok/s", "output_tokens_s"),
        ("input tok/s", "input_tokens_s"),
        ("prompt tokens from the cache", "cached_share"),
        ("requests in progress, mean", "mean_concurrency"),
    ):
        table.add_row(label, *(f"{point[key]:,.2f}" for point in points))
    for label, key, scale in (
        ("TTFT", "ttft_s", 1e3),
        ("TPOT", "tpot_s", 1e3),
        ("stall", "stall_s", 1e3),
        ("end to end", "end_to_end_s", 1e3),
        ("queue", "queue_s", 1e3),
        ("dispatch delay", "dispatch_delay_s", 1e3),
        ("tok/s of a user", "user_tokens_s", 1.0),
    ):
        for share in ("p50", "p90", "p95", "p99"):
            cells = [_cell(point[key], share, scale) for point in points]
            if any(cells):
                table.add_row(f"{label} {share}", *cells)
    console.print(table)
    for point in points:
        energy = point["energy"]
        if energy["valid"]:
            console.print(
                f"{_label(point['load'])}: {energy['joules_per_output_token']:.3g} J for each "
                f"token of output ({energy['source']})"
            )
        for warning in _warnings(point):
            console.print(f"{_label(point['load'])}: {warning}", style="yellow", markup=False)


def _cell(sample: Mapping[str, Any] | None, share: str, scale: float) -> str:
    if sample is None or sample[share] is None:
        return ""
    quantile = sample[share]
    text = f"{quantile['value'] * scale:,.1f}"
    if sample["count"] < 1000 and quantile["low"] is not None and quantile["high"] is not None:
        text += f" ({quantile['low'] * scale:,.1f}–{quantile['high'] * scale:,.1f})"
    return text


def _label(load: Mapping[str, Any]) -> str:
    if load["rate"] is not None:
        return f"{load['rate']:g}/s"
    return "trace" if load["concurrency"] is None else f"{load['concurrency']} at once"


def _warnings(point: Mapping[str, Any]) -> list[str]:
    warnings = []
    if point["num_failed"]:
        reason = "" if point["first_error"] is None else f", the first so: {point['first_error']}"
        warnings.append(f"{point['num_failed']} of {point['num_requests']} requests failed{reason}")
    if point["num_single_token"]:
        warnings.append(f"{point['num_single_token']} requests of one token have no TPOT.")
    law = point["littles_law"]
    if law is not None and abs(law["concurrency"] - law["expected"]) > 0.05 * law["concurrency"]:
        warnings.append(
            f"not a steady state: {law['concurrency']:.1f} requests in progress where Little's "
            f"law expects {law['expected']:.1f}."
        )
    return warnings


def _length(text: str) -> Any:
    from ridgeline.bench.serve.workload import parse_length

    try:
        return parse_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rates(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError("expected numbers: 0.5,1,2") from error
    if not all(0 < value < math.inf for value in values):
        raise argparse.ArgumentTypeError("expected positive numbers")
    return values
