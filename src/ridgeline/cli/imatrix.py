"""``ridgeline imatrix``: what the matrices of a model see, for quantization to GGUF."""

import argparse
from pathlib import Path

from ridgeline.cli.display import loading_bar
from ridgeline.cli.options import Parser
from ridgeline.compress.recipe import EMBEDDED, Recipe
from ridgeline.core.config import EngineConfig


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub name; default: the embedded model"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE", help="imatrix.gguf to be made"
    )
    parser.add_argument(
        "--calibration",
        default=EMBEDDED,
        metavar="FILE",
        help="text, JSONL of texts or conversations, or a folder of them; default: embedded",
    )
    usual = Recipe()
    for option, default, meaning in (
        ("--window-tokens", usual.window_tokens, "length of a calibration sequence"),
        ("--num-windows", usual.num_windows, "how many of them there are at most"),
        ("--seed", usual.seed, "of the choice of windows"),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"{meaning}; default {default}"
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the text with the model, and write what was seen."""
    # After parsing: these bring torch, which --help does not need.
    from ridgeline.compress.calibration import calibration_text
    from ridgeline.compress.imatrix import collect_importance
    from ridgeline.engine.loading import load_model
    from ridgeline.weights.temporary import refuse_existing

    recipe = Recipe(
        window_tokens=arguments.window_tokens,
        num_windows=arguments.num_windows,
        seed=arguments.seed,
    )
    refuse_existing(arguments.out)
    with loading_bar() as progress:
        loaded = load_model(EngineConfig(model=arguments.model, dtype="float32"), progress=progress)
    text = calibration_text(arguments.calibration, loaded, recipe)
    with loading_bar(of_bytes=False) as progress:
        importance = collect_importance(
            loaded.model,
            text.windows,
            dataset=text.source,
            on_window=lambda done, total: progress(done, total, "windows"),
        )
    importance.save(arguments.out)
    print(f"{arguments.out}: {len(importance.sums)} matrices, {text.num_tokens:,} tokens")
    return 0
