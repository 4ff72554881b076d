"""``ridgeline embed``: the embeddings of texts, as JSONL."""

import argparse
import json
from pathlib import Path

from ridgeline.cli.display import error_console, loading_bar
from ridgeline.cli.options import Parser, add_model_options, engine_settings
from ridgeline.cli.text_lines import read_texts

_AT_ONCE = 1024  # texts whose vectors are held before they are printed


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "-p", "--text", action="append", metavar="TEXT", help="a text; may come several times"
    )
    source.add_argument(
        "-i", "--input", type=Path, metavar="FILE",
        help="a text a line, or JSONL with `text` (else standard input)",
    )  # fmt: skip
    parser.add_argument("--prompt-name", metavar="NAME", help="which of the model's prompts, or ''")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers")
    parser.add_argument(
        "--truncate", type=int, metavar="N", help="cut texts to N tokens; -1: to the context"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each text: ``{"index": …, "embedding": […]}``."""
    texts = arguments.text or read_texts(arguments.input)
    from ridgeline.engine.llm import LLM

    with loading_bar() as progress:
        llm = LLM(arguments.model, progress=progress, **engine_settings(arguments))
    with llm:
        for first in range(0, len(texts), _AT_ONCE):
            vectors = llm.embed(
                texts[first : first + _AT_ONCE],
                prompt_name=arguments.prompt_name,
                dimensions=arguments.dimensions,
                truncate=arguments.truncate,
            )
            for index, vector in enumerate(vectors, first):
                numbers = [float(format(number, ".9g")) for number in vector]
                print(json.dumps({"index": index, "embedding": numbers}))
        error_console.print(llm.summary.line, style="dim", markup=False, soft_wrap=True)
    return 0
