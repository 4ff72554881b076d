"""The model of a command that predicts: which one, in which formats, and as what runs it."""

import argparse
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.cli.options import Parser
from ridgeline.core.errors import (
    DiskError,
    InvalidRequestError,
    ModelNotFoundError,
    NetworkError,
)
from ridgeline.core.formats import NumberFormat, float_format, number_format
from ridgeline.core.kv_formats import check_kv_format, kv_dtype_name, kv_number_format
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.registry import TUNED, executor_traits
from ridgeline.executors.traits import ExecutorTraits
from ridgeline.models import PRESETS, describe, lower, read_config
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.kernels import GROUPED


def add_model_options(parser: Parser) -> None:
    """MODEL, --shape, --config, and the formats of numbers."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, hub name, shape or config.json file; default: embedded",
    )
    which.add_argument("--shape", metavar="NAME", help=f"one of {', '.join(sorted(PRESETS))}")
    which.add_argument("--config", type=Path, metavar="FILE", help="any config.json; no weights")
    parser.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16, …; default auto: its own"
    )
    parser.add_argument(
        "--quantization", metavar="NAME", help="format of the layers' weights: int8, int4, fp8, …"
    )
    parser.add_argument(
        "--kv-cache-dtype", metavar="NAME", help="format of the KV cache; default auto"
    )


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model to price, what to call it, and sentences about how it is priced."""

    name: str
    priced: PricedModel
    notes: tuple[str, ...] = ()


def check_model(arguments: argparse.Namespace) -> None:
    """Raise what `read_model` would of a model or format that does not exist, before a machine is
    measured for minutes.

    Raises:
        RidgelineError: there is no such model, shape, file or format.
    """
    describe(_config(arguments)[1])
    _quantization(arguments.quantization)


def read_model(arguments: argparse.Namespace, calibration: Calibration) -> NamedModel:
    """The model of the command line, as the calibrated executor runs it; weights are not read.

    A machine of the catalogue is taken to run it as a tuned engine does that has kernels for its
    formats, whichever they are. Our cuda executor has none for some and expands them to the model's
    type: so does its own calibration's model, and elsewhere a note says it. ``--quantization`` is
    that of the unquantized checkpoint.

    Raises:
        RidgelineError: there is no such model, shape, file or format.
    """
    from ridgeline.quant.declared import declared_formats  # torch takes a second

    name, config = _config(arguments)
    definition = describe(config)
    quantization = _quantization(arguments.quantization)
    kv = _kv_format(arguments.kv_cache_dtype, definition.spec)
    traits = running_traits(calibration)
    if calibration.measured:
        traits.check_formats(quantization, kv)
    declared = declared_formats(definition) if quantization is None else {}
    expanded = {
        weight: named
        for weight, form in declared.items()
        if (named := traits.expands(form, definition.quantization or {})) is not None
    }
    if calibration.measured:
        declared = {weight: form for weight, form in declared.items() if weight not in expanded}
    priced = traits.priced(
        PricedModel(
            spec=definition.spec,
            ops=lower(definition.spec),
            activations=float_format(_chosen(arguments.dtype) or definition.dtype),
            weights=quantization,
            weight_formats=declared,
            kv=kv,
            compute=_compute(quantization, *declared.values()),
            dense_attention=calibration.dense_attention,
        )
    )
    if not calibration.measured:
        priced = replace(priced, kernels=GROUPED)
    notes = () if calibration.measured else _format_notes(priced, quantization, expanded)
    return NamedModel(name=name, priced=priced, notes=tuple(notes))


def running_traits(calibration: Calibration) -> ExecutorTraits:
    """Of the calibrated executor; of the one that is nearest to what a catalogue machine runs."""
    return executor_traits(calibration.executor if calibration.measured else TUNED)


def shape_of(arguments: argparse.Namespace) -> tuple[str, PricedModel]:
    """The name of the model of the command line, and its numbers as they are stored.

    Raises:
        RidgelineError: there is no such model, shape, file or format.
    """
    from ridgeline.quant.declared import declared_formats

    name, config = _config(arguments)
    definition = describe(config)
    quantization = _quantization(arguments.quantization)
    return name, PricedModel(
        spec=definition.spec,
        ops=lower(definition.spec),
        activations=float_format(_chosen(arguments.dtype) or definition.dtype),
        weights=quantization,
        weight_formats=declared_formats(definition) if quantization is None else {},
        kv=_kv_format(arguments.kv_cache_dtype, definition.spec),
    )


def _quantization(name: str | None) -> NumberFormat | None:
    if name in (None, "none"):
        return None
    found = number_format(str(name))
    if not found.is_quantized:
        raise InvalidRequestError(f"{found.name} is no quantized format: use --dtype {found.name}.")
    return found


def _format_notes(
    model: PricedModel, quantization: NumberFormat | None, expanded: Mapping[str, str]
) -> Iterator[str]:
    """That ours does otherwise than the tuned engine which a catalogue machine is taken to run."""
    names = ", ".join(sorted(set(expanded.values())))
    if names:
        yield (
            f"Priced as an engine with kernels for {names} runs it. Our cuda executor has none: it "
            f"expands these weights to {model.activations.name}."
        )
    if quantization is not None and quantization.name not in executor_traits(TUNED).weight_formats:
        yield (
            f"Priced as an engine with kernels for {quantization.name} runs it. Our cuda executor "
            "does not quantize to that on load."
        )


def _chosen(name: str | None) -> str | None:
    return None if name == "auto" else name


def _kv_format(name: str | None, spec: ModelSpec) -> NumberFormat | None:
    form = kv_number_format(kv_dtype_name(name or "auto"))
    check_kv_format(spec, form)
    return form


def _compute(*weights: NumberFormat | None) -> NumberFormat | None:
    """FP8 weights are multiplied by FP8 activations; others are unpacked to the activations'."""
    return next((form for form in weights if form is not None and form.name == "fp8"), None)


def _unknown_model(name: str) -> str:
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    shapes = ", ".join(near or sorted(PRESETS)[:3])
    return (
        f"There is no folder or shape {name[:80]!a}; give a folder, a config.json file, a shape "
        f"such as {shapes} (--help lists them), or a hub model as OWNER/NAME."
    )


def _config(arguments: argparse.Namespace) -> tuple[str, dict[str, object]]:
    shape, path = arguments.shape or arguments.model, arguments.config
    if path is None and str(arguments.model).endswith(".json") and Path(arguments.model).is_file():
        path = arguments.model
    if path is not None:
        try:
            return str(path), read_config(Path(path))
        except (ModelNotFoundError, DiskError) as error:
            raise InvalidRequestError(str(error)) from error
    if shape in PRESETS:
        return str(shape), dict(PRESETS[str(shape)])
    if arguments.shape is not None:
        known = ", ".join(sorted(PRESETS))
        raise InvalidRequestError(f"Unknown shape {shape!r}; choose one of {known}.")
    from ridgeline.weights import locate_model  # torch takes a second: not for --help

    try:
        folder = locate_model(arguments.model, need_weights=False)
    except (ModelNotFoundError, NetworkError) as error:
        if shape is None or "/" in shape:
            raise
        raise ModelNotFoundError(_unknown_model(str(shape))) from error
    if not folder.is_dir():
        raise InvalidRequestError("A GGUF file is not read here; give its --shape or --config.")
    return arguments.model or "embedded", dict(read_config(folder))
