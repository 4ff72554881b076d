"""What commands that make a smaller model share: their texts, and the table of its quality."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ridgeline.cli.display import announce, output_console, print_columns, resumable_run
from ridgeline.cli.options import Parser
from ridgeline.compress.recipe import EMBEDDED, WindowChoice
from ridgeline.core.errors import OutOfMemoryError

if TYPE_CHECKING:
    from ridgeline.compress.calibration import CalibrationText
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.evaluation import Document, Quality

_TEXTS, _TEXT_TOKENS = 12, 400
_Report = TypeVar("_Report")


class LayerRecipe(WindowChoice, Protocol):
    """Settings of what goes through a model layer by layer."""

    @property
    def is_calibrated(self) -> bool:
        """Whether it looks at what a text makes of the layers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredRun(Generic[_Report]):
    """What has gone through ``model``: the ``report`` of it, the ``text`` that it was calibrated
    with, if any, and the ``documents`` that quality is measured on."""

    model: "LayeredModel"
    report: _Report
    text: "CalibrationText | None"
    documents: "list[Document]"


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


def run_layered(
    arguments: argparse.Namespace, recipe: LayerRecipe, work: Callable[..., _Report]
) -> LayeredRun[_Report]:
    """``work`` (`quantize`, `prune`, `convert`) from MODEL to --out, with its progress.

    The text of --calibration has nothing of what quality is measured on.
    """
    from ridgeline.compress.calibration import calibration_text
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.compress.quantize import check_source

    name = None if arguments.model == "embedded" else arguments.model
    model = LayeredModel.open(name, offline=arguments.offline)
    check_source(model)
    documents, text = quality_documents(model, arguments), None
    if recipe.is_calibrated:
        source = getattr(arguments, "calibration", EMBEDDED)
        text = calibration_text(source, model.loaded, recipe)
        text.check_apart(documents)
    with resumable_run(arguments.out) as progress:
        report = work(
            model,
            arguments.out,
            recipe,
            text,
            resume=arguments.resume,
            progress=progress,
            announce=announce,
        )
    return LayeredRun(model=model, report=report, text=text, documents=documents)


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

    announce(f"Measuring the quality on {len(documents)} texts (--no-quality leaves it out).")
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
