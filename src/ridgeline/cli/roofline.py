"""``ridgeline roofline``: the machine's roof, where a model stands under it, what to try next."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.display import output_console, predicted_range
from ridgeline.cli.hardware import (
    THIS,
    add_machine_options,
    check_machine_options,
    this_calibration,
    this_engine_memory,
)
from ridgeline.cli.options import Parser, numbers
from ridgeline.cli.priced_model import (
    add_model_options,
    check_model,
    read_model,
    running_traits,
)
from ridgeline.cli.report_file import check_new_files
from ridgeline.cli.roofline_chart import Roof, draw_svg, draw_text
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import DiskError, InvalidRequestError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.roofline import PricedModel, decode_batch, prefill_batch
from ridgeline.roofline.calibration import Calibration, describe, typical
from ridgeline.roofline.catalogue import DeviceSpec, load_catalogue
from ridgeline.roofline.explain import (
    Advice,
    FormatChange,
    OpPoint,
    RooflinePoint,
    advise,
    fit_sentence,
    ops,
    points,
    product_peak,
    ridges,
    sentences,
)
from ridgeline.roofline.history import PastErrors, past_errors, past_sentences
from ridgeline.roofline.memory import MemoryFit, fit
from ridgeline.roofline.predict import StepPredictor

NO_DATASHEET = "none"


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    add_machine_options(parser, default=THIS)
    parser.add_argument(
        "-tp",
        "--tensor-parallel",
        type=int,
        choices=(1, 2, 4, 8),
        default=1,
        metavar="N",
        help="devices of one host: 1, 2, 4 or 8",
    )
    parser.add_argument(
        "--batch", type=numbers(), default=[1, 8, 32], metavar="N,N", help="sequences that decode"
    )
    parser.add_argument(
        "--context", type=numbers(), default=[512, 2048], metavar="N,N", help="tokens behind them"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw into a file as well")
    parser.add_argument(
        "--datasheet",
        metavar="NAME",
        help="draw the roof of a catalogue device beside, or none; default: this one's, if known",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


@dataclass(frozen=True, kw_only=True)
class _Study:
    """What is told of a model on a machine."""

    title: str
    model: str
    priced: PricedModel
    calibration: Calibration
    roof: Roof
    datasheet: Roof | None
    points: list[RooflinePoint]
    fits: dict[int, MemoryFit]
    ops: dict[str, list[OpPoint]]
    limits: list[str]
    advice: list[Advice]
    past: list[PastErrors]


def run(arguments: argparse.Namespace) -> int:
    """Measure or load the ceilings, predict, draw and explain."""
    check_new_files([arguments.svg])
    study = _study(arguments)
    if arguments.svg is not None:
        try:
            draw_svg(study.points, arguments.svg, study.roof, study.datasheet, title=study.title)
        except OSError as error:
            raise DiskError(f"{arguments.svg} cannot be written: {error.strerror}.") from error
    if arguments.json:
        print(json.dumps(_as_json(study)))
    else:
        _print(study)
    return 0


def _study(arguments: argparse.Namespace) -> _Study:
    check_machine_options(arguments)
    catalogue = load_catalogue(arguments.catalogue)
    is_this = arguments.hardware.lower() == THIS
    other = None if is_this else catalogue.device(arguments.hardware, or_this=True)
    named = None
    if arguments.datasheet is not None and arguments.datasheet != NO_DATASHEET:
        named = catalogue.device(arguments.datasheet)
    check_model(arguments)
    calibration = this_calibration(arguments) if other is None else typical(other.ceilings())
    ceilings = calibration.ceilings
    if arguments.datasheet is None and is_this:
        named = catalogue.known_as(ceilings.name)
    model = read_model(arguments, calibration)
    layout = _layout(arguments.tensor_parallel, model.priced, calibration, is_this=is_this)
    priced = replace(model.priced, layout=layout)
    predictor = StepPredictor({ModelRole.TARGET: priced}, calibration)
    found = points(predictor, arguments.batch, arguments.context)
    if not found:
        raise InvalidRequestError("Every --context is longer than the model's.")
    memory = (
        this_engine_memory(calibration.executor) if other is None else (other.memory_bytes, None)
    )
    fits = {point.context: _fit(priced, *memory, point.context) for point in found}
    context = found[0].context
    decode = decode_batch(arguments.batch[0], context)
    ranks = f", one of {layout.tensor} tensor-parallel" if layout.tensor > 1 else " on"
    return _Study(
        title=f"{model.name}{ranks} {ceilings.name}",
        model=model.name,
        priced=priced,
        calibration=calibration,
        roof=Roof(
            label="measured roof" if calibration.measured else "roof of the datasheet",
            bytes_per_s=ceilings.memory.bytes_per_s,
            peak=product_peak(priced, calibration),
            ridges=ridges(priced, calibration),
        ),
        datasheet=None if named is None else _datasheet(named, priced),
        points=found,
        fits=fits,
        ops={"decode": ops(predictor, decode), "prefill": ops(predictor, prefill_batch(context))},
        limits=[
            *(fit_sentence(each, length) for length, each in fits.items()),
            *sentences(predictor, found),
            *_left_out(arguments.context, priced.spec.max_position),
        ],
        advice=advise(
            predictor,
            batch_size=arguments.batch[0],
            context=context,
            max_batch=fits[context].max_batch,
            variants=_variants(arguments, calibration, priced),
        ),
        past=past_errors(calibration.executor, {priced.main_format.name}),
    )


def _datasheet(device: DeviceSpec, model: PricedModel) -> Roof:
    ceilings = device.ceilings()
    return Roof(
        label=f"datasheet of {device.name}",
        bytes_per_s=ceilings.memory.bytes_per_s,
        peak=ceilings.peak_flops(model.main_product_format),
    )


def _left_out(contexts: Sequence[int], longest: int) -> list[str]:
    beyond = ", ".join(f"{context:,}" for context in contexts if context > longest)
    return [f"Beyond the model's {longest:,} tokens, and left out: {beyond}."] if beyond else []


def _as_json(study: _Study) -> dict[str, Any]:
    calibration, roof = study.calibration, study.roof
    return {
        "model": study.model,
        "hardware": calibration.ceilings.name,
        "tensor_parallel": study.priced.layout.tensor,
        "measured": calibration.measured,
        "ceilings": {
            "memory_bytes_per_s": roof.bytes_per_s,
            "peak_flops_per_s": roof.peak,
            "ridge": roof.peak / roof.bytes_per_s,
            "ridges": roof.ridges,
            "conditions": dict(calibration.ceilings.conditions),
        },
        "datasheet": None if study.datasheet is None else asdict(study.datasheet),
        "fit": {str(length): asdict(each) for length, each in study.fits.items()},
        "points": [
            asdict(point) | {"gap": point.gap, "fits": _has_room(point, study.fits)}
            for point in study.points
        ],
        "ops": {phase: [asdict(op) for op in each] for phase, each in study.ops.items()},
        "limits": study.limits,
        "advice": [asdict(each) for each in study.advice],
        "past_runs": {each.phase: asdict(each) for each in study.past},
        "calibration": describe(calibration) if calibration.measured else None,
    }


def _print(study: _Study) -> None:
    console = output_console()
    console.print(study.title)
    width = max(16, min(72, console.width - 7))  # 7 are the axis
    chart = draw_text(study.points, study.roof, study.datasheet, width=width)
    console.print(chart, markup=False)
    console.print(_table(study.points, study.fits))
    for phase, rows in study.ops.items():
        _print_ops(console, phase, rows)
    for line in study.limits:
        console.print(line)
    for each in study.advice:
        sure = predicted_range(each.low, each.high, ".1f")
        text = f"  {each.gain:4.1f}× ({sure}) {each.what}: {each.change} ({each.how})"
        console.print(text, markup=False)
    basis = _basis(study.calibration, study.priced.main_format, study.past)
    console.print(basis, style="dim")


def _layout(
    tensor: int, model: PricedModel, calibration: Calibration, *, is_this: bool
) -> ParallelLayout:
    from ridgeline.planning.replica import pad_heads, splits  # torch takes a second: not for --help

    if is_this and tensor != 1:
        raise InvalidRequestError("There is one machine like this; -tp is for others.")
    if not splits(model.spec, tensor) or pad_heads(model, tensor) is not model:
        raise InvalidRequestError(
            f"The model's heads cannot be split evenly over {tensor} ranks; `plan` pads them."
        )
    if tensor > 1 and not calibration.ceilings.link_bytes_per_s:
        name = calibration.ceilings.name
        raise InvalidRequestError(f"How fast {name} devices exchange data is not known.")
    return ParallelLayout(tensor=tensor)


def _fit(
    model: PricedModel, memory_bytes: float, kv_share: float | None, context: int
) -> MemoryFit:
    """In the engine, with its defaults."""
    config = EngineConfig()
    return fit(
        model,
        memory_bytes=memory_bytes,
        context=context,
        block_tokens=config.block_tokens,
        kv_share=kv_share,
    )


def _has_room(point: RooflinePoint, fits: Mapping[int, MemoryFit]) -> bool:
    sequences = point.tokens if point.phase == "decode" else 1
    return sequences <= fits[point.context].max_batch


def _variants(
    arguments: argparse.Namespace, calibration: Calibration, model: PricedModel
) -> list[FormatChange]:
    """The model with narrower weights or KV, as the executor would hold them, if it does."""
    traits = running_traits(calibration)

    def variant(change: str, option: str, name: str) -> FormatChange:
        changed = argparse.Namespace(**{**vars(arguments), option: name})
        priced = replace(read_model(changed, calibration).priced, layout=model.layout)
        return FormatChange(change=change, how=f"--{option.replace('_', '-')} {name}", model=priced)

    found = []
    if not model.main_format.is_quantized:
        found += [
            variant(f"quantize weights to {name}", "quantization", name)
            for name in ("int8", "int4")
            if name in traits.weight_formats
        ]
    if not model.kv_format.is_quantized and "int8" in traits.kv_formats:
        found.append(variant("int8 KV cache", "kv_cache_dtype", "int8"))
    return found


def _table(found: Sequence[RooflinePoint], fits: Mapping[int, MemoryFit]) -> Table:
    table = Table("point", "FLOP/byte", "GFLOP/s", "roof", "ms (80 %)", "bound", box=None)
    for point in found:
        table.add_row(
            point.name,
            f"{point.intensity:.1f}",
            f"{point.flops_per_s / 1e9:,.1f}",
            f"{point.roof_flops_per_s / 1e9:,.1f}",
            f"{point.seconds * 1e3:.2f} "
            f"({predicted_range(point.low_s * 1e3, point.high_s * 1e3, '.2f')})",
            point.bound if _has_room(point, fits) else f"{point.bound}; does not fit",
        )
    return table


def _print_ops(console: Console, phase: str, found: list[OpPoint]) -> None:
    parts = [
        f"{op.name} {op.share:.0%} ({op.intensity:.1f} FLOP/B, {op.bound})"
        for op in found
        if op.share >= 0.01
    ]
    console.print(f"{phase} by op: {', '.join(parts)}")


def _basis(calibration: Calibration, form: NumberFormat, past: Sequence[PastErrors]) -> str:
    if not calibration.measured:
        return "Not measured: datasheet ceilings, typical efficiencies, wide intervals."
    p90 = calibration.spread("decode", form).p90_error
    text = f"Measured: {describe(calibration)}; p90 of these weights' decode {p90:.0%}."
    return " ".join((text, *past_sentences(past)))
