"""``ridgeline probe URL``: how fast an OpenAI-compatible endpoint is, and where it throttles."""

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import error_console
from ridgeline.cli.options import Parser, numbers, positive
from ridgeline.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from ridgeline.bench.serve.http_target import HttpTarget


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add this command to the command line."""
    parser = commands.add_parser("probe", help="measure an OpenAI-compatible endpoint")
    parser.add_argument("url", metavar="URL", help="of the server, or of its /v1")
    parser.add_argument("--model-name", metavar="NAME", help="default: the first that is listed")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--input-lens", type=numbers(), default=[32, 128, 512], metavar="N,N", help="prompt tokens"
    )
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="output tokens")
    parser.add_argument(
        "--concurrency", type=numbers(), default=[1, 2, 4, 8, 16, 32], metavar="N,N"
    )
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="for each point")
    parser.add_argument(
        "--max-token-id", type=int, default=999, metavar="N", help="prompts are random ids to this"
    )
    parser.add_argument(
        "--prompts",
        choices=("auto", "ids", "text", "chat"),
        default="auto",
        help="what is sent; auto: the first of these that the endpoint takes",
    )
    parser.add_argument(
        "--weights-gb", type=positive, metavar="GB", help="weights of a model that it may be"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    least = {"output_len": 2, "requests": 1, "max_token_id": 1}
    for name, low in least.items():
        if getattr(arguments, name) < low:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least {low}.")
    report = asyncio.run(_measure(arguments))
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["num_completed"] else 1


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.bench.serve.probe import implied_bandwidth, probe
    from ridgeline.bench.serve.prompts import Prompts

    target = HttpTarget(arguments.url, model=arguments.model_name or "", api_key=arguments.api_key)
    name = await _model_name(arguments, target)
    target = target.with_model(name)
    with error_console.status("probing") as status:
        if arguments.prompts == "auto":
            await target.adapt((1, 1, 1))
        else:
            target.prompts = Prompts(arguments.prompts)
        found = await probe(
            target,
            input_lengths=arguments.input_lens,
            output_tokens=arguments.output_len,
            concurrencies=arguments.concurrency,
            requests_per_point=arguments.requests,
            vocab=range(min(10, arguments.max_token_id), arguments.max_token_id + 1),
            progress=lambda text: status.update(text),
        )
    report = {"url": arguments.url, "model": name, "prompts": target.prompts, **asdict(found)}
    tpot_s = found.loads[0].tpot_p50_s if found.loads else None
    if arguments.weights_gb is not None and tpot_s:
        report["implied"] = implied_bandwidth(arguments.weights_gb * 1e9, tpot_s)
    return report


async def _model_name(arguments: argparse.Namespace, target: "HttpTarget") -> str:
    if arguments.model_name is not None:
        return str(arguments.model_name)
    names = await target.models()
    if not names:
        raise InvalidRequestError("The endpoint lists no models; name one with --model-name.")
    return names[0]


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"{report['model']} at {report['url']}, prompts as {report['prompts']}")
    table = Table("prompt tokens", "TTFT ms")
    for point in report["lengths"]:
        table.add_row(f"{point['input_tokens']:g}", _ms(point["ttft_s"]))
    console.print(table)
    if report["prefill_tokens_s"] is not None:
        console.print(
            f"prefill {report['prefill_tokens_s']:,.0f} tok/s over {_ms(report['overhead_s'])} ms"
        )
    columns = ("at once", "output tok/s", "TTFT p50 ms", "TPOT p50 ms", "failed", "throttled")
    table = Table(*columns)
    for load in report["loads"]:
        table.add_row(
            str(load["concurrency"]), f"{load['output_tokens_s']:.1f}", _ms(load["ttft_p50_s"]),
            _ms(load["tpot_p50_s"]), str(load["num_failed"]), str(load["num_throttled"]),
        )  # fmt: skip
    console.print(table)
    if report["throttled_at"] is not None:
        console.print(f"Requests are refused (429, 503) from {report['throttled_at']} at once.")
    elif not report["num_completed"]:
        console.print("No request was answered.")
    elif report["saturation"] is not None:
        console.print(f"Output hardly grows beyond {report['saturation']} at once.")
    else:
        console.print("It was not saturated by this load.")
    if report["error"] is not None:
        console.print(f"Some failed otherwise, the first so: {report['error']}", markup=False)
    if "implied" in report:
        rate = report["implied"]["bytes_per_s"] / 1e9
        console.print(f"Weights of that size, read once a token, would be {rate:,.1f} GB/s.")


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"
