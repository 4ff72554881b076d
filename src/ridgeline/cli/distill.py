"""``ridgeline distill``: a student that learns a teacher's answers, or the text itself."""

import argparse
from pathlib import Path

from ridgeline.cli.display import output_console, resumable_run
from ridgeline.cli.model_quality import add_quality_options, print_quality, quality_documents
from ridgeline.cli.options import Parser, add_settings, given_settings
from ridgeline.cli.training_ranks import add_ranks_option, is_launcher, run_on_ranks
from ridgeline.compress.recipe import EMBEDDED
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.core.errors import InvalidRequestError


def add_options(parser: Parser) -> None:
    """STUDENT, --teacher, --out, every field of `TrainingRecipe`, and the texts."""
    parser.add_argument("model", metavar="STUDENT", help="folder or hub name, or embedded")
    parser.add_argument(
        "--teacher", metavar="MODEL", help="folder or hub name, or embedded; of the same tokens"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="folder to make"
    )
    add_training_options(parser)
    add_quality_options(parser)
    parser.set_defaults(run=run)


def add_training_options(parser: Parser) -> None:
    """Every field of `TrainingRecipe`, the text to train on, and --ranks."""
    add_settings(parser, TrainingRecipe, title="training", shown=True)
    parser.add_argument(
        "--train-text",
        default=EMBEDDED,
        metavar="FILE",
        help="text, JSONL of texts or conversations, or a folder of them; default: embedded, 90 KB "
        "of Python and English, which is little",
    )
    add_ranks_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print what it gave."""
    recipe = training_recipe(arguments)
    if is_launcher(arguments, recipe):
        return run_on_ranks(arguments)
    # After parsing: these bring torch, which --help does not need.
    from ridgeline.compress.calibration import training_text
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.ranks import joined_ranks
    from ridgeline.compress.training import distill

    offline = arguments.offline
    student = LayeredModel.open(_name(arguments.model), offline=offline)
    teacher = None
    if arguments.teacher is not None:
        teacher = LayeredModel.open(_name(arguments.teacher), offline=offline)
    documents = quality_documents(student, arguments)
    text = training_text(arguments.train_text, student.loaded)
    text.check_apart(documents)
    with joined_ranks(arguments.ranks) as ranks, resumable_run(arguments.out) as progress:
        report = distill(
            student,
            teacher,
            arguments.out,
            recipe,
            text,
            resume=arguments.resume,
            progress=progress if ranks.is_first else None,
            ranks=ranks,
        )
    if report is None:
        return 0
    output_console().print(
        f"{report.path}: {report.weights_bytes / 1e6:,.1f} MB of weights, {recipe.steps} steps of "
        f"{recipe.step_tokens:,} tokens ({text.source}: {len(text.tokens):,}), loss "
        f"{report.first_loss:.4f} at first and {report.last_loss:.4f} at last",
        markup=False,
        soft_wrap=True,
    )
    if documents:
        print_quality(teacher or student, report.path, documents)
    return 0


def training_recipe(arguments: argparse.Namespace) -> TrainingRecipe:
    """What is asked for; without a teacher the loss is the next token's.

    Raises:
        InvalidRequestError: a part of it would have no effect.
    """
    given = given_settings(arguments, TrainingRecipe)
    if arguments.teacher is None:
        for name in ("kl_share", "top_k"):
            if name in given:
                option = name.replace("_", "-")
                raise InvalidRequestError(f"--{option} has no effect without --teacher.")
        given["kl_share"] = 0.0
    return TrainingRecipe(**given)


def _name(model: str) -> str | None:
    return None if model == EMBEDDED else model
