"""``ridgeline rerank``: documents by their relevance to a query, as JSONL."""

import argparse
import json
from pathlib import Path

from ridgeline.cli.display import error_console, loading_bar
from ridgeline.cli.options import Parser, add_model_options, engine_settings
from ridgeline.cli.text_lines import read_texts


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    parser.add_argument("-q", "--query", required=True, metavar="TEXT", help="what is looked for")
    parser.add_argument(
        "-i", "--input", type=Path, metavar="FILE",
        help="a document a line, or JSONL with `text` (else standard input)",
    )  # fmt: skip
    parser.add_argument("--top", type=int, metavar="N", help="print the best N")
    parser.add_argument(
        "--truncate", type=int, metavar="N", help="cut pairs to N tokens; -1: to the context"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each document: ``{"index": …, "score": …, "text": …}``, the best first."""
    documents = read_texts(arguments.input)
    from ridgeline.engine.llm import LLM

    with loading_bar() as progress:
        llm = LLM(arguments.model, progress=progress, **engine_settings(arguments))
    with llm:
        found = llm.rerank(
            arguments.query, documents, top_n=arguments.top, truncate=arguments.truncate
        )
        for each in found:
            line = {"index": each.index, "score": each.score, "text": documents[each.index]}
            print(json.dumps(line, ensure_ascii=False))
        error_console.print(llm.summary.line, style="dim", markup=False, soft_wrap=True)
    return 0
