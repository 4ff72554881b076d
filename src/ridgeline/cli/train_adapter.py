"""``ridgeline train-adapter``: a LoRA adapter from text, or in the place of a prompt."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ridgeline.cli.display import output_console, resumable_run
from ridgeline.cli.distill import add_training_options
from ridgeline.cli.options import Parser, given_settings
from ridgeline.cli.text_lines import read_texts
from ridgeline.cli.training_ranks import is_launcher, run_on_ranks
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.core.errors import DiskError, InvalidRequestError

if TYPE_CHECKING:
    from ridgeline.compress.adapters import AdaptedModel
    from ridgeline.compress.batches import WindowStream
    from ridgeline.compress.context import Example
    from ridgeline.compress.ranks import TrainingRanks

_UNSEEN = 5  # of so many questions one is held out
_CONTEXT_OPTIONS = ("questions", "num_questions", "answer_tokens")


def add_options(parser: Parser) -> None:
    """MODEL, --out, the rank, the context, and every field of `TrainingRecipe`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub name; default: the embedded model"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="folder to make"
    )
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="of the adapter")
    parser.add_argument(
        "--context",
        type=Path,
        metavar="FILE",
        help="a prompt: the adapter answers as the model does behind it; without one it learns "
        "--train-text",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="one a line, for --context; default: the model asks them",
    )
    parser.add_argument(
        "--num-questions",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="that the model asks; default: 64",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="of an answer at most; default: 64",
    )
    add_training_options(parser)
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out")
    parser.add_argument("--offline", action="store_true", help="use no network")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print what it gave."""
    recipe = _recipe(arguments)
    if is_launcher(arguments, recipe):
        return run_on_ranks(arguments)
    # After parsing: this brings torch, which --help does not need.
    from ridgeline.compress.ranks import joined_ranks

    with joined_ranks(arguments.ranks) as ranks:
        told = _trained(arguments, recipe, ranks)
    if ranks.is_first:
        console = output_console()
        for line in told:
            console.print(line, markup=False, soft_wrap=True)
    return 0


def _trained(
    arguments: argparse.Namespace, recipe: TrainingRecipe, ranks: "TrainingRanks"
) -> list[str]:
    """What to tell of the run; the first rank alone has all of it."""
    from ridgeline.compress.adapters import AdaptedModel
    from ridgeline.compress.block_model import next_token_loss, training_dtype
    from ridgeline.compress.calibration import training_text
    from ridgeline.compress.context import ExampleStream, context_loss, digest
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.training import text_stream

    model = LayeredModel.open(arguments.model, offline=arguments.offline)
    text = training_text(arguments.train_text, model.loaded)
    windows = text_stream(text, recipe)
    adapted = AdaptedModel(model, arguments.rank, recipe.seed, ranks)
    dtype = training_dtype(model.loaded.model.ops)
    identity: dict[str, object] = {"text": text.digest, "context": None}
    seen: list[Example] = []
    unseen: list[Example] = []
    if arguments.context is not None:
        examples = _examples(arguments, recipe, ranks)
        unseen = examples[_UNSEEN - 1 :: _UNSEEN] or examples[-1:]
        seen = [each for each in examples if each not in unseen]
        identity["context"] = digest(examples)
    with resumable_run(arguments.out) as progress:
        report = adapted.train(
            arguments.out,
            identity,
            context_loss(adapted, seen, dtype) if seen else next_token_loss(adapted.adapted, dtype),
            recipe,
            ExampleStream(seen, windows, recipe.micro_batch_tokens) if seen else windows,
            resume=arguments.resume,
            progress=progress if ranks.is_first else None,
        )
    told = [_measured(adapted, unseen, windows)] if unseen else []
    if report is None:
        return told
    return [
        f"{report.path}: {report.weights_bytes / 1e6:,.2f} MB, rank {adapted.rank}, "
        f"{recipe.steps} steps, loss {report.first_loss:.4f} at first and {report.last_loss:.4f} "
        "at last",
        *told,
    ]


def _recipe(arguments: argparse.Namespace) -> TrainingRecipe:
    """What is asked for.

    Raises:
        InvalidRequestError: a part of it would have no effect.
    """
    given = given_settings(arguments, TrainingRecipe)
    for name in ("kl_share", "top_k", "keep_zeros", "ternary"):
        if name in given:
            raise InvalidRequestError(f"--{name.replace('_', '-')} has no effect on an adapter.")
    for name in _CONTEXT_OPTIONS:
        if arguments.context is None and hasattr(arguments, name):
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} has no effect without --context."
            )
    if not 1 <= arguments.rank <= 4096:
        raise InvalidRequestError(f"--rank is {arguments.rank}; it must be from 1 to 4096.")
    return TrainingRecipe(**given)


def _examples(
    arguments: argparse.Namespace, recipe: TrainingRecipe, ranks: "TrainingRanks"
) -> "list[Example]":
    """What the model says behind the context, which the first rank asks."""
    from ridgeline.compress.context import Example

    def written() -> str:
        return msgspec.json.encode(_written_examples(arguments, recipe)).decode()

    return msgspec.json.decode(ranks.text_of_first(written), type=list[Example])


def _written_examples(arguments: argparse.Namespace, recipe: TrainingRecipe) -> "list[Example]":
    from ridgeline.compress.context import write_examples
    from ridgeline.engine.llm import LLM

    try:
        context = arguments.context.read_text(encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{arguments.context} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{arguments.context} is not UTF-8 text.") from None
    questions = read_texts(arguments.questions) if hasattr(arguments, "questions") else []
    with LLM(arguments.model, offline=arguments.offline) as llm:
        return write_examples(
            llm,
            context,
            questions,
            num_questions=getattr(arguments, "num_questions", 64),
            answer_tokens=getattr(arguments, "answer_tokens", 64),
            seed=recipe.seed,
        )


def _measured(adapted: "AdaptedModel", unseen: "list[Example]", windows: "WindowStream") -> str:
    """Divergences in float32: of answers to questions that were held out, and of other text."""
    from ridgeline.compress.context import measured_divergences

    last = range(max(0, windows.num_windows - 4), windows.num_windows)  # of the first epoch
    other = [windows.window(number)[:-1].tolist() for number in last]
    bare, found, unrelated = measured_divergences(adapted, unseen, other)
    return (
        f"{len(unseen)} questions that it has not seen: KL of the answers {bare:.4f} without the "
        f"context, {found:.4f} with the adapter ({found / bare:.2f} of that); of other text "
        f"{unrelated:.4f}"
    )
