"""``ridgeline quantize``: a model folder in fewer bits, calibrated, with its quality measured."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.config_file import ConfigFile
from ridgeline.cli.display import output_console
from ridgeline.cli.model_quality import add_text_options, print_quality, run_layered
from ridgeline.cli.options import Parser, add_settings, given_settings
from ridgeline.compress.recipe import Recipe
from ridgeline.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from ridgeline.compress.calibration import CalibrationText
    from ridgeline.compress.quantize import QuantizationReport


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
    add_text_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantize, and print what it cost."""
    # After parsing: these bring torch, which --help does not need.
    from ridgeline.compress.quantize import quantize
    from ridgeline.kernels.cpu.library import native_kernels_run

    recipe = _recipe(arguments)
    done = run_layered(arguments, recipe, quantize)
    _print_report(done.report, recipe, done.text)
    if done.documents:
        # The file leaves the head in float, for others; here it gets fewer bits, too.
        is_own = recipe.is_factored and recipe.bits_per_weight is None
        head = f"int{recipe.bits}" if is_own and native_kernels_run() else None
        print_quality(done.model, done.report.path, done.documents, head=head)
    return 0


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """What is asked for, unless a part of it would have no effect."""
    given = given_settings(arguments, Recipe)
    if arguments.out.suffix.lower() == ".gguf":
        given.setdefault("format", "gguf")
    recipe = Recipe(**given)
    if recipe.format != "gguf" and "gguf_type" in given:
        raise InvalidRequestError("--gguf-type has no effect without --format gguf.")
    if recipe.format != "gguf" and arguments.out.suffix.lower() == ".gguf":
        raise InvalidRequestError(
            f"{arguments.out} is a GGUF file by its name, not a folder of --format {recipe.format}."
        )
    if not recipe.is_calibrated and hasattr(arguments, "calibration"):
        raise InvalidRequestError(f"--calibration has no effect with --method {recipe.method}.")
    return recipe


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
    tuned = [note["tuned"] for note in report.notes.values() if "tuned" in note]
    if tuned:
        seen += f", {sum(tuned) / len(tuned):.2f} of the layers' errors left by tuning"
    lines = [f"{report.path}: {report.weights_bytes / 1e6:,.1f} MB of weights, {seen}"]
    if report.num_weights:
        total = sum(report.num_weights.values())
        shares = (f"{size / total:.0%} in {bits}" for bits, size in report.num_weights.items())
        mean = f"{report.bits_per_weight:.3f} bits a weight of the layers"
        lines.append(f"{mean}: {', '.join(shares)}")
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
