"""``ridgeline prune``: a model with zeros in its matrices, or a smaller one, and its quality."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.display import output_console
from ridgeline.cli.model_quality import add_text_options, print_quality, run_layered
from ridgeline.cli.options import Parser, add_settings, given_settings
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from ridgeline.compress.pruning.prune import PruneReport


def add_options(parser: Parser) -> None:
    """MODEL, --out, every field of `PruneRecipe`, and the texts."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub name; default: the embedded model"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="folder to make"
    )
    add_settings(parser, PruneRecipe, title="recipe", shown=True)
    add_text_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prune, and print what it cost."""
    # After parsing: this brings torch, which --help does not need.
    from ridgeline.compress.pruning.prune import prune

    recipe = _recipe(arguments)
    done = run_layered(arguments, recipe, prune)
    _print_report(done.report, recipe)
    if done.documents:
        print_quality(done.model, done.report.path, done.documents)
    return 0


def _recipe(arguments: argparse.Namespace) -> PruneRecipe:
    """What is asked for, unless a part of it would have no effect."""
    given = given_settings(arguments, PruneRecipe)
    recipe = PruneRecipe(**given)
    if recipe.is_structured and given.keys() & {"sparsity", "pattern"}:
        raise InvalidRequestError(
            "--sparsity and --pattern have no effect beside --remove-…: prune twice, the second "
            "time what the first wrote."
        )
    if recipe.pattern != "unstructured" and "sparsity" in given:
        raise InvalidRequestError(f"--sparsity has no effect beside --pattern {recipe.pattern}.")
    if not recipe.is_calibrated and hasattr(arguments, "calibration"):
        raise InvalidRequestError(f"--calibration has no effect with --method {recipe.method}.")
    return recipe


def _print_report(report: "PruneReport", recipe: PruneRecipe) -> None:
    lines = [f"{report.path}: {report.weights_bytes / 1e6:,.1f} MB of weights"]
    if recipe.is_structured:
        errors = [note["error"] for note in report.notes.values()]
        if report.removed_layers:
            lines[0] += f", without the layers {', '.join(map(str, report.removed_layers))}"
        if errors:
            lines[0] += f"; cut matrices lost {sum(errors) / len(errors):.2%} of their outputs"
    else:
        lines[0] += f", {report.sparsity:.1%} of the layers' are zero"
        lines.append("Zeros take as much memory and time as other weights.")
    fallback = [name for name, note in report.notes.items() if note.get("fallback")]
    if fallback:
        lines.append(f"by Wanda's scores, its inputs having no inverse: {', '.join(fallback)}")
    console = output_console()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
