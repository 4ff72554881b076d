"""``ridgeline eval``: a model's perplexity on text, and its distance from another model."""

import argparse
import dataclasses
import json
from pathlib import Path

from ridgeline.cli.display import output_console, print_columns
from ridgeline.cli.options import Parser, add_model_options, engine_settings
from ridgeline.compress.layers import LayeredModel
from ridgeline.core.errors import InvalidRequestError, TokenizerError
from ridgeline.engine.llm import LLM
from ridgeline.evaluation import (
    Document,
    LogProbabilities,
    Quality,
    QualitySum,
    encode_documents,
    heldout_texts,
    read_texts,
    served_log_probabilities,
)

_EMBEDDED = "embedded"
_AGAIN = 2  # documents that are computed a second time
_ROUNDING = 1e-7  # of a mean of float32 log-probabilities


def add_options(parser: Parser) -> None:
    """MODEL, the engine's settings, the reference and the text."""
    add_model_options(parser)
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="reference, computed in float32; `embedded` for the embedded model",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text or JSONL; default: what is held out here"
    )
    parser.add_argument(
        "--text-tokens", type=int, default=512, metavar="N", help="of each text, from its start"
    )
    parser.add_argument("--texts", type=int, default=16, metavar="N", help="how many at most")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if arguments.text_tokens < 2 or arguments.texts < 1:
        raise InvalidRequestError("--text-tokens must be 2 or more, and --texts 1 or more.")
    texts = heldout_texts() if arguments.text is None else read_texts(arguments.text)
    with LLM(arguments.model, **engine_settings(arguments)) as llm:
        if llm.tokenizer is None:
            raise TokenizerError("The model has no tokenizer: its text cannot be measured.")
        length = min(arguments.text_tokens, llm.config.max_model_len - 1)
        documents = encode_documents(llm.tokenizer, texts[: arguments.texts], max_tokens=length)
        found = list(served_log_probabilities(llm, documents))
        again = list(served_log_probabilities(llm, documents[:_AGAIN]))
        executor = llm.config.executor
    floor = max(_compared(again, found[:_AGAIN]).kl, _ROUNDING)
    quality = _compared(found, _reference(arguments.against, documents, found))
    _print(arguments, quality, floor, executor)
    return 0


def _reference(
    name: str | None, documents: list[Document], found: list[tuple[Document, LogProbabilities]]
) -> list[tuple[Document, LogProbabilities]]:
    """Those of the reference; without one the model's own."""
    if name is None:
        return found
    reference = LayeredModel.open(None if name == _EMBEDDED else name)
    spec, width = reference.loaded.definition.spec, found[0][1].shape[-1]
    if spec.vocab_size != width:
        raise InvalidRequestError(
            f"The models have {width:,} and {spec.vocab_size:,} tokens: what they say of the next "
            "one cannot be compared."
        )
    return list(reference.log_probabilities(documents))


def _compared(
    found: list[tuple[Document, LogProbabilities]],
    reference: list[tuple[Document, LogProbabilities]],
) -> Quality:
    total = QualitySum()
    for (tokens, some), (_, wanted) in zip(found, reference, strict=True):
        total.add(tokens, some, wanted)
    return total.quality()


def _print(arguments: argparse.Namespace, quality: Quality, floor: float, executor: str) -> None:
    console, model = output_console(), arguments.model or _EMBEDDED
    if arguments.json:
        figures = dataclasses.asdict(quality)
        if arguments.against is None:
            figures = {name: figures[name] for name in ("num_tokens", "perplexity")}
        else:
            figures |= {"noise_floor": floor, "is_above_noise": quality.kl > floor}
        console.print_json(json.dumps({"model": model, "against": arguments.against, **figures}))
        return
    lines = [(f"{model} ({executor})", f"{quality.perplexity:.4f}")]
    if arguments.against is not None:
        lines.append((f"{arguments.against} (float32)", f"{quality.reference_perplexity:.4f}"))
    print_columns(console, ("", "perplexity"), lines)
    if arguments.against is not None and quality.kl <= floor:
        console.print(f"no difference above the noise of a second run, KL {floor:.0e}")
    elif arguments.against is not None:
        header = ("KL", "± s.e.", "median", "99.9%", "max", "same top", "RMS Δp")
        row = (
            f"{quality.kl:.3e}",
            f"{quality.kl_error:.0e}",
            f"{quality.kl_median:.2e}",
            f"{quality.kl_tail:.2e}",
            f"{quality.kl_max:.2e}",
            f"{quality.same_top:.2%}",
            f"{quality.rms_dp:.3%}",
        )
        print_columns(console, header, [row])
        console.print(f"noise of a second run: KL {floor:.0e}", soft_wrap=True)
    console.print(f"on {quality.num_tokens:,} tokens", soft_wrap=True)
