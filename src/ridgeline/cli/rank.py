"""``ridgeline rank``: models beside each other, by their ``config.json`` alone."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.display import output_console, print_columns, print_paragraph, status_line
from ridgeline.cli.hardware import THIS, calibration_of, this_machine
from ridgeline.cli.options import Parser
from ridgeline.cli.priced_model import check_model, read_model
from ridgeline.core.errors import InvalidRequestError
from ridgeline.executors import default_executor
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.history import past_errors, past_sentences
from ridgeline.roofline.slo import Slo, parse_slo

if TYPE_CHECKING:
    from ridgeline.planning import Machine, RankedModel

_BY = ("score", "speed", "cost", "memory")
_ALL = "all"
_MOST_TOKENS = 100_000_000


def add_options(parser: Parser) -> None:
    """The models, the machines, the load of one request, and the order."""
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="folders, hub names, shapes or config.json files"
    )
    parser.add_argument(
        "--hardware",
        default=THIS,
        metavar="A,B",
        help="this, devices of the catalogue (l4,h100), or all of those with a price",
    )
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="devices of your own")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="devices of each kind")
    parser.add_argument("--context", type=int, default=1000, metavar="N", help="prompt tokens")
    parser.add_argument("--output", type=int, default=200, metavar="N", help="output tokens")
    parser.add_argument("--slo", metavar="S", help="limits in seconds: ttft=0.5,tpot=0.05")
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16, …; default: its own")
    parser.add_argument("--quantization", metavar="NAME", help="of the layers' weights: int8, int4")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="format of the KV cache")
    parser.add_argument(
        "--scores", type=Path, metavar="FILE", help='how good models are: JSON, {"MODEL": 71.3, …}'
    )
    parser.add_argument(
        "--by", choices=_BY, help="order; default: score, if there is any, or speed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Predict every model on every machine, and print them in order."""
    for name in ("count", "context", "output"):
        if not 1 <= getattr(arguments, name) <= (1024 if name == "count" else _MOST_TOKENS):
            raise InvalidRequestError(f"--{name} is out of bounds.")
    slo = Slo() if arguments.slo is None else parse_slo(arguments.slo)
    scores = {} if arguments.scores is None else _scores(arguments.scores)
    named = [_named(arguments, name) for name in arguments.models]
    for each in named:
        check_model(each)
    from ridgeline.planning import order_ranked, rank_model

    found, left_out, past = list["RankedModel"](), list[str](), list[str]()
    with status_line("ranking") as show:
        for machine in _machines(arguments):
            formats = set[str]()
            for name, options in zip(arguments.models, named, strict=True):
                show(f"ranking: {name} on {machine.name}")
                model = read_model(options, machine.calibration)
                if not machine.calibration.ceilings.has_rate(model.priced.activations):
                    form = model.priced.activations.name
                    left_out.append(f"{machine.name} does not compute {name} in {form}.")
                    continue
                formats.add(model.priced.main_format.name)
                found.append(
                    rank_model(
                        name,
                        model.priced,
                        machine,
                        context=arguments.context,
                        output_tokens=arguments.output,
                        slo=slo,
                        score=scores.get(name),
                    )
                )
            if machine.measured:
                past += past_sentences(past_errors(machine.calibration.executor, formats))
    by = arguments.by or ("score" if scores else "speed")
    ordered = order_ranked(found, by)
    notes = [*left_out, *_notes(ordered, arguments, slo), *past]
    if arguments.json:
        print(json.dumps({"models": [asdict(each) for each in ordered], "by": by, "notes": notes}))
    else:
        _print(ordered, by, notes, has_slo=slo.is_set)
    return 0


def _named(arguments: argparse.Namespace, name: str) -> argparse.Namespace:
    """As `read_model` takes a model."""
    return argparse.Namespace(
        model=name,
        shape=None,
        config=None,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )


def _machines(arguments: argparse.Namespace) -> "list[Machine]":
    from ridgeline.planning import catalogue_machine

    catalogue = load_catalogue(arguments.catalogue)
    names = [name.strip().lower() for name in arguments.hardware.split(",")]
    if names == [_ALL]:
        priced = (name for name, each in catalogue.devices.items() if each.usd_per_hour)
        return [catalogue_machine(catalogue, name, arguments.count) for name in priced]
    if len(set(names)) < len(names):
        raise InvalidRequestError("Each kind of device is named once.")
    if THIS in names and arguments.count != 1:
        raise InvalidRequestError("There is one machine like this; --count is for others.")
    # Before this one is measured, for minutes, if it has not been.
    others = {
        name: catalogue_machine(catalogue, name, arguments.count) for name in names if name != THIS
    }
    return [
        others.get(name) or this_machine(calibration_of(default_executor(), anew=False))
        for name in names
    ]


def _scores(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(score) for name, score in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidRequestError(f'{path} is not {{"MODEL": score, …}}: {error}') from error


def _notes(found: "list[RankedModel]", arguments: argparse.Namespace, slo: Slo) -> list[str]:
    notes = []
    if any(each.context < arguments.context for each in found):
        notes.append("Models whose context is shorter are ranked at the longest prompt they take.")
    if not slo.is_set:
        notes.append("Without --slo as many sequences run as have room, 256 at the most.")
    if any(each.score is None for each in found) and arguments.scores is not None:
        names = dict.fromkeys(each.model for each in found if each.score is None)
        notes.append(f"No score is given for {', '.join(names)}.")
    notes.append(
        "Predicted, not measured: intervals hold eight times of ten; on machines of the catalogue "
        "by datasheets and typical efficiencies."
    )
    return notes


def _print(found: "list[RankedModel]", by: str, notes: list[str], *, has_slo: bool) -> None:
    console = output_console()
    header = (
        "model", "on", "params", "GB", "fits", "prompt s", "ms/token", "at once", "tok/s", "$/1M",
        "SLO", "score",
    )  # fmt: skip
    rows = [
        (
            each.model,
            each.hardware if each.num_devices == 1 else f"{each.num_devices} × {each.hardware}",
            f"{each.parameters / 1e9:.2f}B",
            f"{each.weights_bytes / 1e9:.2f}",
            f"{each.max_batch:,}" if each.fits else "no",
            _interval(each.prefill, 1.0),
            _interval(each.decode, 1e3),
            str(each.concurrency) if each.fits else "",
            f"{each.output_tok_s:,.0f}" if each.fits else "",
            "" if each.usd_per_1m_output is None else f"{each.usd_per_1m_output:.2f}",
            ("yes" if each.meets_slo else "no") if has_slo and each.fits else "",
            "" if each.score is None else f"{each.score:g}",
        )
        for each in found
    ]
    console.print(f"the best by {by} first", style="dim")
    told = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    header, *rows = zip(*told, strict=True)
    print_columns(console, header, rows, labels=2)
    for note in notes:
        print_paragraph(console, f"note: {note}", indent=2, style="dim")


def _interval(prediction: object, scale: float) -> str:
    from ridgeline.roofline.predict import Prediction

    if not isinstance(prediction, Prediction):
        return ""
    low, high = prediction.low_s * scale, prediction.high_s * scale
    return f"{prediction.seconds * scale:.3g} ({low:.2g}–{high:.2g})"
