"""``ridgeline roofline``: the machine's roof, where a model stands under it, what to try next."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ridgeline.cli.hardware import (
    THIS,
    add_machine_options,
    add_model_options,
    read_model,
    this_calibration,
)
from ridgeline.cli.options import Parser, numbers
from ridgeline.core.errors import DiskError, InvalidRequestError
from ridgeline.core.plan import ModelRole
from ridgeline.roofline import decode_batch, prefill_batch
from ridgeline.roofline.calibration import Calibration, typical
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.drawing import draw_svg, draw_text
from ridgeline.roofline.explain import OpPoint, advise, ops, points, product_peak, sentences
from ridgeline.roofline.history import read as read_history
from ridgeline.roofline.history import typical_error
from ridgeline.roofline.predict import StepPredictor


def add_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add this command to the command line."""
    parser = commands.add_parser("roofline", help="what bounds a model here, and what to try next")
    add_model_options(parser)
    add_machine_options(parser, default=THIS)
    parser.add_argument(
        "--batch", type=numbers(), default=[1, 8, 32], metavar="N,N", help="sequences that decode"
    )
    parser.add_argument(
        "--context", type=numbers(), default=[512, 2048], metavar="N,N", help="tokens behind them"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw into a file as well")
    parser.add_argument(
        "--datasheet", metavar="NAME", help="draw the roof of a catalogue device beside"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure or load the ceilings, predict, draw and explain."""
    catalogue = load_catalogue(arguments.catalogue)
    is_this = arguments.hardware.lower() == THIS
    other = None if is_this else catalogue.device(arguments.hardware)
    named_roof = None
    if arguments.datasheet is not None:
        named_roof = catalogue.device(arguments.datasheet).ceilings()
    calibration = this_calibration(arguments) if other is None else typical(other.ceilings())
    model = read_model(arguments, calibration)
    priced = model.priced
    predictor = StepPredictor({ModelRole.TARGET: priced}, calibration)
    found = points(predictor, arguments.batch, arguments.context)
    if not found:
        raise InvalidRequestError("Every --context is longer than the model's.")
    peak = product_peak(priced, calibration)
    memory = calibration.ceilings.memory.bytes_per_s
    datasheet = None
    if named_roof is not None:
        datasheet = (named_roof.memory.bytes_per_s, named_roof.peak_flops(priced.compute_format))
    context = min(arguments.context[0], priced.spec.max_position)
    decode = decode_batch(arguments.batch[0], context)
    by_phase = {"decode": ops(predictor, decode), "prefill": ops(predictor, prefill_batch(context))}
    advice = advise(predictor, batch_size=arguments.batch[0], context=context)
    lines = sentences(predictor, found)
    past = typical_error(read_history(), calibration.executor)
    if arguments.svg is not None:
        title = f"{model.name} on {calibration.ceilings.name}"
        try:
            draw_svg(
                found, arguments.svg, title=title, bytes_per_s=memory, peak=peak,
                datasheet=datasheet,
            )  # fmt: skip
        except OSError as error:
            raise DiskError(f"{arguments.svg} cannot be written: {error.strerror}.") from error
    if arguments.json:
        result = {
            "model": model.name,
            "hardware": calibration.ceilings.name,
            "measured": calibration.measured,
            "ceilings": {
                "memory_bytes_per_s": memory,
                "peak_flops_per_s": peak,
                "ridge": peak / memory,
                "conditions": dict(calibration.ceilings.conditions),
            },
            "points": [asdict(point) | {"gap": point.gap} for point in found],
            "ops": {phase: [asdict(op) for op in each] for phase, each in by_phase.items()},
            "limits": lines,
            "advice": [asdict(each) for each in advice],
            "past_error": past,
        }
        print(json.dumps(result))
        return 0
    console = Console(highlight=False)
    console.print(f"{model.name} on {calibration.ceilings.name}")
    drawing = draw_text(found, bytes_per_s=memory, peak=peak, datasheet=datasheet)
    console.print(drawing, markup=False)
    table = Table("point", "FLOP/byte", "GFLOP/s", "roof", "ms (80 %)", "bound", box=None)
    for point in found:
        table.add_row(
            point.name,
            f"{point.intensity:.1f}",
            f"{point.flops_per_s / 1e9:,.1f}",
            f"{point.roof_flops_per_s / 1e9:,.1f}",
            f"{point.seconds * 1e3:.2f} ({point.low_s * 1e3:.2f} to {point.high_s * 1e3:.2f})",
            point.bound,
        )
    console.print(table)
    for phase, rows in by_phase.items():
        _print_ops(console, phase, rows)
    for line in lines:
        console.print(line)
    for each in advice:
        console.print(f"  {each.gain:4.1f}× {each.what}: {each.change} ({each.how})", markup=False)
    console.print(_basis(calibration, past), style="dim")
    return 0


def _print_ops(console: Console, phase: str, found: list[OpPoint]) -> None:
    parts = [
        f"{op.name} {op.share:.0%} ({op.intensity:.1f} FLOP/B, {op.bound})"
        for op in found
        if op.share >= 0.01
    ]
    console.print(f"{phase} by op: {', '.join(parts)}")


def _basis(calibration: Calibration, past: float | None) -> str:
    if not calibration.measured:
        return "Not measured: datasheet ceilings, typical efficiencies, wide intervals."
    spread = calibration.spreads["decode"]
    text = (
        f"Measured {calibration.created[:10]} on the {calibration.executor} executor; error on "
        f"unseen shapes: median {spread.median_error:.0%}, p90 {spread.p90_error:.0%}."
    )
    if calibration.ceilings.conditions.get("contended"):
        text += " Other processes contended while it was measured."
    return text if past is None else f"{text} Past runs: {past:.0%} median."
