"""``ridgeline bench serve``: latency, throughput and goodput under load."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.cli.display import ProgressCallback, loading_bar, output_console
from ridgeline.cli.load_report import add_report_options, prices_of, print_points, slo_of
from ridgeline.cli.options import Parser, add_model_options, engine_settings, numbers
from ridgeline.cli.report_file import add_html_option, check_new_files, write_html
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.core.errors import InvalidRequestError
from ridgeline.roofline.slo import Slo

if TYPE_CHECKING:
    from ridgeline.bench.serve.costs import Prices
    from ridgeline.bench.serve.session import LoadPoint
    from ridgeline.bench.serve.targets import Target
    from ridgeline.engine.async_engine import AsyncEngine

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


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    target = parser.add_argument_group("target")
    target.add_argument("--url", help="OpenAI-compatible server, instead of an engine here")
    target.add_argument("--model-name", metavar="NAME", help="model to ask the server for")
    target.add_argument("--api-key", metavar="KEY")
    target.add_argument(
        "--prompts", choices=("auto", "ids", "text", "chat"), help="to the URL; default: ids"
    )
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
    work.add_argument(
        "--output-len", type=_length, default="64", metavar="DIST", help="as --input-len"
    )
    work.add_argument("--prefix-len", type=int, default=0, metavar="N", help="shared tokens before")
    work.add_argument(
        "--num-prefixes", type=int, default=1, metavar="N", help="different ones of those"
    )
    work.add_argument("--turns", type=int, default=1, metavar="N", help="per conversation")
    work.add_argument("--think-s", type=float, default=0.0, metavar="S", help="between turns")
    work.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before")
    add_report_options(parser)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write SVG plots there")
    parser.add_argument("--traces", action="store_true", help="with --json: every request, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_html_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sweep; print a table or one JSON object. Exit code 1 if every request failed."""
    for name, least in _LEAST.items():
        if not least <= getattr(arguments, name) <= _MOST:
            option = name.replace("_", "-")
            raise InvalidRequestError(f"--{option} must be between {least} and {_MOST:,}.")
    check_new_files([arguments.html])
    if arguments.prompts is not None and arguments.url is None:
        raise InvalidRequestError("--prompts is how a --url is asked.")
    if arguments.plots is not None:
        from ridgeline.bench.serve.plots import require_plots, write_plots

        require_plots()
    slo, prices = slo_of(arguments), prices_of(arguments)
    name, points = asyncio.run(_run(arguments, slo, prices))
    report: dict[str, Any] = {
        "model": name,
        "seed": _seed(arguments),
        "definitions": "docs/metrics.md",
        "points": [point.to_json(with_traces=arguments.traces) for point in points],
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        print_points(output_console(), name, report["points"])
    if arguments.html is not None:
        from ridgeline.bench.serve.page import page

        write_html(arguments, page(report))
    if arguments.plots is not None:
        for path in write_plots(points, arguments.plots, title=name):
            print(path, file=sys.stderr)
    return 1 if all(point.summary.num_failed == len(point.traces) for point in points) else 0


class _Served(NamedTuple):
    """What is loaded: a server, or an engine of this command's own."""

    name: str
    target: "Target"
    vocab: range
    engine: "AsyncEngine | None" = None
    may_be_short: bool = False  # outputs, by what prompts were made of


async def _served(stack: AsyncExitStack, arguments: argparse.Namespace) -> _Served:
    """Reach the server that is asked for, or start an engine, which ``stack`` ends."""
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.bench.serve.prompts import Prompts
    from ridgeline.bench.serve.targets import EngineTarget
    from ridgeline.engine.async_engine import AsyncEngine

    if arguments.url is not None:
        http = HttpTarget(
            arguments.url, model=arguments.model_name or "", api_key=arguments.api_key
        )
        name = arguments.model_name or await http.first_model()
        target = http.with_model(name)
        if arguments.prompts == "auto":
            await http.adapt((1, 1, 1))
        else:
            http.prompts = Prompts(arguments.prompts or "ids")
        is_short = http.prompts is not Prompts.IDS
        return _Served(name, target, range(10, _MAX_VOCAB), may_be_short=is_short)
    config = with_overrides(EngineConfig(model=arguments.model), **engine_settings(arguments))
    with loading_bar() as progress:
        engine = AsyncEngine(config, in_process=arguments.in_process, progress=progress)
        await stack.enter_async_context(engine)
    size = engine.spec.vocab_size
    vocab = range(min(10, size - 1), min(_MAX_VOCAB, size))
    return _Served(engine.model_name, EngineTarget(engine), vocab, engine)


async def _run(
    arguments: argparse.Namespace, slo: Slo, prices: "Prices"
) -> "tuple[str, Sequence[LoadPoint]]":
    from ridgeline.bench.serve.session import Arrivals, run_point, warm_up
    from ridgeline.bench.serve.workload import Workload, read_trace

    async with AsyncExitStack() as stack:
        served = await _served(stack, arguments)
        workload = Workload(
            num_conversations=arguments.num_requests,
            input_length=arguments.input_len,
            output_length=arguments.output_len,
            num_turns=arguments.turns,
            prefix_tokens=arguments.prefix_len,
            num_prefixes=arguments.num_prefixes,
            vocab=served.vocab,
            seed=_seed(arguments),
        )
        await warm_up(served.target, workload, arguments.warmup)
        points: list[LoadPoint] = []
        for load in _loads(arguments, Arrivals):
            if arguments.trace is not None:
                conversations = read_trace(arguments.trace, vocab=served.vocab, seed=workload.seed)
            else:
                # Other contents at each load: the cache of one is no help to the next.
                seed = workload.seed + 7919 * len(points)
                conversations = list(workload.at(rate=load.rate, seed=seed).conversations())
            total = sum(len(each.turns) for each in conversations)
            with loading_bar(of_bytes=False) as bar:
                point = await run_point(
                    served.target,
                    load,
                    conversations,
                    slo=slo,
                    prices=prices,
                    think_s=arguments.think_s,
                    engine=served.engine,
                    may_be_short=served.may_be_short,
                    progress=partial(_show, bar, total, load.label),
                )
            points.append(point)
        return served.name, points


def _show(bar: ProgressCallback, total: int, label: str, done: int) -> None:
    bar(done, total, label)


def _loads(arguments: argparse.Namespace, load: Any) -> list[Any]:
    if arguments.rate is not None:
        return [load(rate=rate) for rate in arguments.rate]
    if arguments.trace is not None:
        return [load()]
    return [load(concurrency=count) for count in arguments.concurrency or (1,)]


def _seed(arguments: argparse.Namespace) -> int:
    return int(getattr(arguments, "seed", 0))


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
