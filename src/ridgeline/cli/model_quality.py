"""What commands that make a smaller model share: their texts, and the table of its quality."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.display import output_console, print_columns
from ridgeline.cli.options import Parser
from ridgeline.compress.recipe import EMBEDDED
from ridgeline.core.errors import OutOfMemoryError

if TYPE_CHECKING:
    from ridgeline.compress.calibration import CalibrationText
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.recipe import WindowChoice
    from ridgeline.evaluation import Document, Quality

_TEXTS, _TEXT_TOKENS = 12, 400


def add_text_options(parser: Parser) -> None:
    """The text to calibrate with, and `add_quality_options`."""
    parser.add_argument(
        "--calibration",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="text, JSONL of texts or conversations, or a folder of them; default: embedded, 90 KB "
        "of Python and English",
    )
    add_quality_options(parser)


def add_quality_options(parser: Parser) -> None:
    """The text to measure on, --resume and --offline."""
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text that quality is measured on"
    )
    parser.add_argument(
        "--no-quality", dest="quality", action="store_false", help="leave out the table at the end"
    )
    parser.add_argument("--offline", action="store_true", help="use no network")


def quality_documents(model: "LayeredModel", arguments: argparse.Namespace) -> "list[Document]":
    """The texts that quality is measured on; none if it is not wanted."""
    from ridgeline.evaluation import encode_documents, heldout_texts, read_texts

    if model.loaded.tokenizer is None or not arguments.quality:
        return []
    texts = heldout_texts() if arguments.text is None else read_texts(arguments.text)
    return encode_documents(model.loaded.tokenizer, texts[:_TEXTS], max_tokens=_TEXT_TOKENS)


def calibration(
    model: "LayeredModel",
    choice: "WindowChoice",
    arguments: argparse.Namespace,
    documents: "list[Document]",
) -> "CalibrationText":
    """The text of --calibration, which has nothing of what quality is measured on."""
    from ridgeline.compress.calibration import calibration_text

    source = getattr(arguments, "calibration", EMBEDDED)
    text = calibration_text(source, model.loaded, choice)
    text.check_apart(documents)
    return text


def print_quality(
    model: "LayeredModel",
    path: Path,
    documents: "list[Document]",
    *,
    head: str | None = None,
) -> None:
    """The model at ``path`` read back: its values in float32, and as the engine serves it.

    ``model`` is computed again for each, so that one text's log-probabilities are held at a time.
    ``head`` is the format on load of what is not quantized yet.
    """
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.engine.llm import LLM
    from ridgeline.evaluation import QualitySum, served_log_probabilities

    alone, served = QualitySum(), QualitySum()
    written = LayeredModel.open(str(path))
    for (tokens, reference), (_, found) in zip(
        model.log_probabilities(documents), written.log_probabilities(documents), strict=True
    ):
        alone.add(tokens, found, reference)
    rows = [_row("weights alone, float32", alone.quality())]
    why = ""
    try:
        with LLM(str(path), quantization=head) as llm:
            for (tokens, reference), (_, found) in zip(
                model.log_probabilities(documents),
                served_log_probabilities(llm, documents),
                strict=True,
            ):
                served.add(tokens, found, reference)
            name = f"served, {llm.config.executor}{f' --quantization {head}' if head else ''}"
            rows.append(_row(name, served.quality()))
    except OutOfMemoryError as error:
        why = f"Not served here: {error}"
    perplexity = alone.quality().reference_perplexity
    rows.insert(0, ("as it was", f"{perplexity:.3f}", *[""] * 5))
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
