"""``ridgeline eval``: a model's perplexity on text, and its distance from another model."""

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.display import output_console, print_columns
from ridgeline.cli.options import Parser, add_model_options, engine_settings
from ridgeline.core.errors import InvalidRequestError, TokenizerError

if TYPE_CHECKING:
    from ridgeline.compress.layers import LayeredModel
    from ridgeline.evaluation import Document, LogProbabilities, Quality

    Scored = tuple[Document, LogProbabilities]

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
    # After parsing: these bring torch, which --help does not need.
    from ridgeline.engine.llm import LLM
    from ridgeline.evaluation import (
        encode_documents,
        heldout_texts,
        read_texts,
        served_log_probabilities,
    )

    if arguments.text_tokens < 2 or arguments.texts < 1:
        raise InvalidRequestError("--text-tokens must be 2 or more, and --texts 1 or more.")
    texts = heldout_texts() if arguments.text is None else read_texts(arguments.text)
    reference = _reference(arguments)
    with LLM(arguments.model, **engine_settings(arguments)) as llm:
        if llm.tokenizer is None:
            raise TokenizerError("The model has no tokenizer: its text cannot be measured.")
        if reference is not None:
            _check_vocabularies(llm.spec.vocab_size, reference.loaded.definition.spec.vocab_size)
        length = min(arguments.text_tokens, llm.config.max_model_len - 1)
        documents = encode_documents(llm.tokenizer, texts[: arguments.texts], max_tokens=length)
        # Text by text: log-probabilities are as many as its tokens times the vocabulary.
        found = served_log_probabilities(llm, documents)
        if reference is None:
            quality = _compared((each, each) for each in found)
        else:
            wanted = reference.log_probabilities(documents)
            quality = _compared(zip(found, wanted, strict=True))
        twice = [served_log_probabilities(llm, documents[:_AGAIN]) for _ in range(2)]
        floor = max(_compared(zip(*twice, strict=True)).kl, _ROUNDING)
        executor = llm.config.executor
    _print(arguments, quality, floor, executor)
    return 0


def _reference(arguments: argparse.Namespace) -> "LayeredModel | None":
    from ridgeline.compress.layers import LayeredModel

    if arguments.against is None:
        return None
    name = None if arguments.against == _EMBEDDED else arguments.against
    offline = engine_settings(arguments).get("offline", False)
    return LayeredModel.open(name, offline=bool(offline))


def _check_vocabularies(width: int, reference_width: int) -> None:
    if width != reference_width:
        raise InvalidRequestError(
            f"The models have {width:,} and {reference_width:,} tokens: what they say of the next "
            "one cannot be compared."
        )


def _compared(pairs: "Iterable[tuple[Scored, Scored]]") -> "Quality":
    """What is found, beside what is wanted."""
    from ridgeline.evaluation import QualitySum

    total = QualitySum()
    for (tokens, found), (_, wanted) in pairs:
        total.add(tokens, found, wanted)
    return total.quality()


def _print(arguments: argparse.Namespace, quality: "Quality", floor: float, executor: str) -> None:
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
