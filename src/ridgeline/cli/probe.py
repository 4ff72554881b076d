"""``ridgeline probe URL``: how fast an OpenAI-compatible endpoint is, and where it throttles."""

import argparse
import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import output_console, status_line, with_interval
from ridgeline.cli.load_report import add_report_options, prices_of, print_points, slo_of
from ridgeline.cli.options import Parser, numbers
from ridgeline.cli.priced_model import NamedModel, check_model, read_model
from ridgeline.cli.probe_drift import add_drift_options, model_name, run_drift
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.roofline.calibration import typical
from ridgeline.roofline.catalogue import DeviceSpec, load_catalogue
from ridgeline.roofline.predict import StepPredictor

if TYPE_CHECKING:
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.bench.serve.probe import ProbePlan, ProbeReport

_LEAST = {"output_len": 2, "requests": 1, "rounds": 1, "max_token_id": 1, "tensor_parallel": 1}


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("url", metavar="URL", help="of the server, or of its /v1")
    parser.add_argument("--model-name", metavar="NAME", help="default: the first that is listed")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--input-lens", type=numbers(), default=[32, 128, 512], metavar="N,N", help="prompt tokens"
    )
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="output tokens")
    parser.add_argument(
        "--concurrency",
        type=numbers(),
        default=[1, 2, 4, 8, 16, 32],
        metavar="N,N",
        help="requests at once",
    )
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="a point and round")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="through all loads")
    parser.add_argument(
        "--max-token-id", type=int, default=999, metavar="N", help="prompts are random ids to this"
    )
    parser.add_argument(
        "--prompts",
        choices=("auto", "ids", "text", "chat"),
        default="auto",
        help="what is sent; auto: the first of these that the endpoint takes",
    )
    add_report_options(parser)
    guess = parser.add_argument_group("a model and machine that it may be")
    which = guess.add_mutually_exclusive_group()
    which.add_argument("--shape", metavar="NAME", help="of a known model: llama-3.1-8b, …")
    which.add_argument("--config", type=Path, metavar="FILE", help="any config.json")
    guess.add_argument("--dtype", metavar="NAME", help="of the weights; default: its own")
    guess.add_argument("--quantization", metavar="NAME", help="of the weights: int8, int4, fp8, …")
    guess.add_argument("--kv-cache-dtype", metavar="NAME")
    guess.add_argument("--hardware", metavar="NAME", help="a device of the catalogue")
    guess.add_argument("--catalogue", type=Path, metavar="FILE", help="devices of your own")
    guess.add_argument("-tp", "--tensor-parallel", type=int, default=1, metavar="N", help="devices")
    add_drift_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, model=None)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Exit code 1 if no request was answered."""
    if arguments.reference is not None:
        return run_drift(arguments)
    for name, low in _LEAST.items():
        if getattr(arguments, name) < low:
            raise InvalidRequestError(f"--{name.replace('_', '-')} must be at least {low}.")
    stand_in = _StandIn.of(arguments)
    plan = _plan(arguments)
    target, name, found = asyncio.run(_measure(arguments, plan))
    report: dict[str, Any] = {
        "url": arguments.url,
        "model": name,
        "prompts": str(target.prompts),
        "definitions": "docs/metrics.md",
        **found.to_json(),
    }
    if stand_in is not None:
        report["stand_in"] = stand_in.compare(found, plan)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if found.num_completed else 1


def _plan(arguments: argparse.Namespace) -> "ProbePlan":
    from ridgeline.bench.serve.probe import ProbePlan

    return ProbePlan(
        input_lengths=arguments.input_lens,
        output_tokens=arguments.output_len,
        concurrencies=arguments.concurrency,
        requests=arguments.requests,
        rounds=arguments.rounds,
        vocab=range(min(10, arguments.max_token_id), arguments.max_token_id + 1),
        slo=slo_of(arguments),
        prices=prices_of(arguments),
    )


async def _measure(
    arguments: argparse.Namespace, plan: "ProbePlan"
) -> "tuple[HttpTarget, str, ProbeReport]":
    from ridgeline.bench.serve.http_target import HttpTarget
    from ridgeline.bench.serve.probe import probe
    from ridgeline.bench.serve.prompts import Prompts

    target = HttpTarget(arguments.url, model=arguments.model_name or "", api_key=arguments.api_key)
    name = await model_name(arguments, target)
    target = target.with_model(name)
    with status_line("probing") as show:
        if arguments.prompts == "auto":
            await target.adapt((1, 1, 1))
        else:
            target.prompts = Prompts(arguments.prompts)
        return target, name, await probe(target, plan, progress=show)


class _StandIn:
    """A model of known shape, on a machine of the catalogue or on none in particular."""

    def __init__(
        self,
        model: NamedModel,
        device: DeviceSpec,
        devices: Mapping[str, DeviceSpec],
        *,
        is_named: bool,
    ) -> None:
        self._model, self._device, self._devices = model, device, devices
        self._is_named = is_named

    @staticmethod
    def of(arguments: argparse.Namespace) -> "_StandIn | None":
        """What the command line names; ``None`` if it names no shape.

        Raises:
            RidgelineError: there is no such shape, file, format or device.
        """
        if arguments.shape is None and arguments.config is None:
            for name in ("hardware", "catalogue", "dtype", "quantization", "kv_cache_dtype"):
                if getattr(arguments, name) is not None:
                    option = name.replace("_", "-")
                    raise InvalidRequestError(f"--{option} is of a --shape or --config.")
            return None
        from ridgeline.planning.replica import splits  # torch takes a second: not for --help

        check_model(arguments)
        catalogue = load_catalogue(arguments.catalogue)
        # Bytes and FLOPs of a catalogue machine's model are the same on all of them.
        device = catalogue.device(arguments.hardware or "h100")
        model = read_model(arguments, typical(device.ceilings()))
        ranks = arguments.tensor_parallel
        if not splits(model.priced.spec, ranks):
            raise InvalidRequestError(f"The model's heads cannot be split over {ranks} ranks.")
        priced = replace(model.priced, layout=ParallelLayout(tensor=ranks))
        named = arguments.hardware is not None
        return _StandIn(replace(model, priced=priced), device, catalogue.devices, is_named=named)

    def compare(self, found: "ProbeReport", plan: "ProbePlan") -> dict[str, Any]:
        """The stand-in beside what was measured; plain values."""
        from ridgeline.bench.serve.stand_in import bound_of, implied, verdict

        alone = next((p for p in found.points if p.load.concurrency == 1), None)
        tpot = alone.summary.tpot_s if alone else None
        shortest = found.lengths[0].input_tokens if found.lengths else plan.input_lengths[0]
        context = shortest + plan.output_tokens / 2
        would = implied(
            self._model.priced,
            self._devices,
            context=context,
            tpot_s=tpot.p50.value if tpot else None,
            prefill_tokens_s=found.prefill_tokens_s,
        )
        result: dict[str, Any] = {"model": self._model.name, "implied": asdict(would)}
        if not self._is_named:
            return result
        ceilings = self._device.ceilings()
        predictor = StepPredictor({ModelRole.TARGET: self._model.priced}, typical(ceilings))
        times = [
            bound_of(predictor, "prefill", 1, point.input_tokens, point.ttft_s.value)
            for point in found.lengths
        ]
        for point in found.points:
            if point.summary.tpot_s is not None:
                batch = point.load.concurrency or 1
                seconds = point.summary.tpot_s.p50.value
                times.append(bound_of(predictor, "decode", batch, context, seconds))
        return result | {
            "hardware": self._device.name,
            "tensor_parallel": self._model.priced.layout.tensor,
            "times": [asdict(each) | {"is_possible": each.is_possible} for each in times],
            "verdict": verdict(times) if times else None,
        }


def _print(report: dict[str, Any]) -> None:
    console = output_console()
    console.print(f"{report['url']}, prompts as {report['prompts']}", markup=False)
    table = Table("prompt tokens, alone", "TTFT ms", box=None)
    for point in report["lengths"]:
        table.add_row(f"{point['input_tokens']:g}", _quantile_ms(point["ttft_s"]))
    console.print(table)
    if report["prefill_tokens_s"] is not None:
        console.print(
            f"prefill {report['prefill_tokens_s']:,.0f} tok/s over {_ms(report['overhead_s'])} ms"
        )
    if report["points"]:
        print_points(console, report["model"], report["points"])
    throttling, saturation = report["throttling"], report["saturation"]
    if throttling is not None:
        console.print(
            f"Requests are refused (429, 503) from {throttling['concurrency']} at once: "
            f"{throttling['refused_share']:.0%} of them, while {throttling['completed_rpm']:,.0f} "
            "a minute were answered."
        )
    elif not report["num_completed"]:
        console.print("No request was answered.")
    elif saturation is not None:
        rounds = len(report["output_tokens_s"][0])
        console.print(
            f"Output hardly grows beyond {saturation['concurrency']} at once "
            f"({saturation['low']} to {saturation['high']} in {rounds} rounds)."
        )
    else:
        console.print("It was not saturated by this load.")
    if report["error"] is not None:
        console.print(f"Some failed otherwise, the first so: {report['error']}", markup=False)
    if "stand_in" in report:
        _print_stand_in(console, report["stand_in"])


def _print_stand_in(console: Console, found: dict[str, Any]) -> None:
    would = found["implied"]
    rates = [
        f"{would[key] / scale:,.1f} {unit}"
        for key, scale, unit in (
            ("bytes_per_s", 1e9, "GB/s in decode"),
            ("flops_per_s", 1e12, "TFLOP/s in prefill"),
        )
        if would[key] is not None
    ]
    devices = ", ".join(would["devices"]) or "none of the catalogue"
    console.print(f"Were it {found['model']}: {' and '.join(rates)}; one of these could: {devices}")
    if "times" not in found:
        return
    table = Table(f"on {found['tensor_parallel']} × {found['hardware']}", box=None)
    for name in ("measured ms", "roof ms", "predicted ms (80%)", "MFU", "MBU", "bound"):
        table.add_column(name, justify="right")
    for each in found["times"]:
        what = (
            f"TTFT of {each['tokens']:g} tokens"
            if each["phase"] == "prefill"
            else f"TPOT of {each['batch']} at once"
        )
        predicted = with_interval(
            *(1e3 * each[f"{name}_s"] for name in ("predicted", "low", "high"))
        )
        table.add_row(
            what, _ms(each["measured_s"]), _ms(each["roof_s"]), predicted,
            f"{each['mfu']:.1%}", f"{each['mbu']:.1%}", each["bound"],
        )  # fmt: skip
    console.print(table)
    if found["verdict"] is not None:
        console.print(found["verdict"], soft_wrap=True)


def _quantile_ms(value: dict[str, float | None]) -> str:
    low, middle, high = (
        each and each * 1e3 for each in (value["low"], value["value"], value["high"])
    )
    return with_interval(middle or 0.0, low, high)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"
