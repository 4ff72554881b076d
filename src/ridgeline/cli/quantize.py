"""``ridgeline quantize``: a model folder in fewer bits, calibrated, with its quality measured."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.config_file import ConfigFile
from ridgeline.cli.display import error_console, loading_bar, output_console, print_columns
from ridgeline.cli.options import Parser, add_settings, given_settings
from ridgeline.compress.recipe import EMBEDDED, Recipe
from ridgeline.core.errors import InvalidRequestError, OutOfMemoryError

if TYPE_CHECKING:
    from ridgeline.compress.calibration import CalibrationText
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.quantize import QuantizationReport
    from ridgeline.evaluation import Document, Quality

_TEXTS, _TEXT_TOKENS = 12, 400


def add_options(parser: Parser) -> None:
    """MODEL, --out, every field of `Recipe`, and the texts."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub name; default: the embedded model"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to make, or a file that ends in .gguf",
    )
    add_settings(parser, Recipe, title="recipe", shown=True)
    parser.add_argument(
        "--recipe",
        dest="config_file",
        action=ConfigFile,
        type=Path,
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="these settings by name; those of the command line go before",
    )
    parser.add_argument(
        "--calibration",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="text, JSONL of texts or conversations, or a folder of them; default: embedded, 90 KB "
        "of Python and English",
    )
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text that quality is measured on"
    )
    parser.add_argument(
        "--no-quality", dest="quality", action="store_false", help="leave out the table at the end"
    )
    parser.add_argument("--offline", action="store_true", help="use no network")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantize, and print what it cost."""
    # After parsing: these bring torch, which --help does not need.
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.quantize import check_source, quantize

    recipe = _recipe(arguments)
    model = LayeredModel.open(arguments.model, offline=arguments.offline)
    check_source(model)
    documents = _documents(model, arguments) if arguments.quality else []
    source = getattr(arguments, "calibration", EMBEDDED)
    text = _calibration(model, recipe, source, documents)
    try:
        with loading_bar(of_bytes=False) as progress:
            report = quantize(
                model,
                arguments.out,
                recipe,
                text,
                resume=arguments.resume,
                progress=progress,
                announce=lambda need: error_console.print(f"{need}", markup=False),
            )
    except KeyboardInterrupt:
        print(f"Stopped; --resume goes on with {arguments.out}.", file=sys.stderr)
        raise
    _print_report(report, recipe, text)
    if documents:
        _print_quality(model, report, recipe, documents)
    return 0


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """What is asked for, unless a part of it would have no effect."""
    given = given_settings(arguments, Recipe)
    recipe = Recipe(**given)
    if recipe.format != "gguf" and "gguf_type" in given:
        raise InvalidRequestError("--gguf-type has no effect without --format gguf.")
    if recipe.format != "gguf" and arguments.out.suffix == ".gguf":
        raise InvalidRequestError(f"{arguments.out} is a GGUF file by its name: add --format gguf.")
    if not recipe.is_calibrated and hasattr(arguments, "calibration"):
        raise InvalidRequestError(f"--calibration has no effect with --method {recipe.method}.")
    return recipe


def _documents(model: "LayeredModel", arguments: argparse.Namespace) -> "list[Document]":
    from ridgeline.evaluation import encode_documents, heldout_texts, read_texts

    if model.loaded.tokenizer is None:
        return []
    texts = heldout_texts() if arguments.text is None else read_texts(arguments.text)
    return encode_documents(model.loaded.tokenizer, texts[:_TEXTS], max_tokens=_TEXT_TOKENS)


def _calibration(
    model: "LayeredModel", recipe: Recipe, source: str, documents: "list[Document]"
) -> "CalibrationText | None":
    from ridgeline.compress.calibration import calibration_text

    if not recipe.is_calibrated:
        return None
    text = calibration_text(source, model.loaded, recipe)
    text.check_apart(documents)
    return text


def _print_report(
    report: "QuantizationReport", recipe: Recipe, text: "CalibrationText | None"
) -> None:
    console = output_console()
    if not report.notes:
        console.print(f"{report.path} is finished already.", markup=False, soft_wrap=True)
        return
    seen = "no calibration"
    if text is not None:
        seen = f"calibrated on {text.num_tokens:,} tokens ({text.source})"
    if recipe.method == "gptq":
        seen += f", error of outputs {report.error_ratio:.2f} of rounding to the nearest"
    lines = [f"{report.path}: {report.weights_bytes / 1e6:,.1f} MB of weights, {seen}"]
    for name, reason in report.left.items():
        how = "rounded to the nearest" if report.path.is_file() else "left as it is"
        lines.append(f"{how}: {name}, since {reason}")
    for what, told in (
        ("fallback", "rounded to the nearest, its inputs having no inverse"),
        ("unseen", "calibrated with what all experts saw, since no token reached it"),
    ):
        names = [name for name, note in report.notes.items() if note.get(what)]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"{told}: {names[0]}{more}")
    dead = sum(note["dead"] for note in report.notes.values())
    if dead:
        lines.append(f"{dead} inputs of matrices were always zero")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _print_quality(
    model: "LayeredModel",
    report: "QuantizationReport",
    recipe: Recipe,
    documents: "list[Document]",
) -> None:
    """The file read back: its values in float32, and as the engine serves it.

    The model is computed again for each, so that one text's log-probabilities are held at a time.
    """
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.engine.llm import LLM
    from ridgeline.evaluation import QualitySum, served_log_probabilities
    from ridgeline.kernels.cpu.library import native_kernels_run

    alone, served = QualitySum(), QualitySum()
    written = LayeredModel.open(str(report.path))
    for (tokens, reference), (_, found) in zip(
        model.log_probabilities(documents), written.log_probabilities(documents), strict=True
    ):
        alone.add(tokens, found, reference)
    rows = [_row("weights alone, float32", alone.quality())]
    why = ""
    if recipe.export_only:
        why = "Not served: written for other engines (--export-only)."
    else:
        try:
            # The file leaves the head in float, for others; here it gets fewer bits, too.
            head = "int4" if recipe.is_factored and native_kernels_run() else None
            with LLM(str(report.path), quantization=head) as llm:
                for (tokens, reference), (_, found) in zip(
                    model.log_probabilities(documents),
                    served_log_probabilities(llm, documents),
                    strict=True,
                ):
                    served.add(tokens, found, reference)
                name = f"served, {llm.config.executor}{' --quantization int4' if head else ''}"
                rows.append(_row(name, served.quality()))
        except OutOfMemoryError as error:
            why = f"Not served here: {error}"
    perplexity = alone.quality().reference_perplexity
    rows.insert(0, ("unquantized", f"{perplexity:.3f}", *[""] * 5))
    header = ("", "perplexity", "KL", "± s.e.", "99.9%", "same top", "RMS Δp")
    console = output_console()
    print_columns(console, header, rows)
    console.print(f"on {alone.quality().num_tokens:,} tokens. {why}", markup=False, soft_wrap=True)


def _row(name: str, quality: "Quality") -> tuple[str, ...]:
    return (
        name,
        f"{quality.perplexity:.3f}",
        f"{quality.kl:.2e}",
        f"{quality.kl_error:.0e}",
        f"{quality.kl_tail:.2e}",
        f"{quality.same_top:.1%}",
        f"{quality.rms_dp:.2%}",
    )
