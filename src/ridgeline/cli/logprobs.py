"""Log-probabilities as tables, for ``ridgeline generate`` without ``--json``."""

import math
from collections.abc import Sequence

from ridgeline.cli.display import output_console
from ridgeline.core.request import RequestOutput
from ridgeline.core.result import TokenLogprobs
from ridgeline.text import Tokenizer


def print_logprobs(output: RequestOutput, tokenizer: Tokenizer | None) -> None:
    """A table for the prompt and one for each sample, where they were asked for."""
    if output.prompt_logprobs is not None:
        _print("prompt", output.prompt_logprobs, tokenizer)
    for sample in output.outputs:
        if sample.logprobs is not None:
            title = "output" if len(output.outputs) == 1 else f"output {sample.index}"
            _print(title, sample.logprobs, tokenizer)


def _print(
    title: str, entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> None:
    from rich.table import Table  # only where there is one to show
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    table.add_column("token", no_wrap=True)
    for name in ("logprob", "probability", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("likeliest")
    for entry in entries:
        if entry is None:  # the first token of a prompt follows nothing
            continue
        others = [f"{_shown(token, tokenizer)} {logprob:.2f}" for token, logprob in entry.top]
        cells = (
            _shown(entry.token_id, tokenizer),
            f"{entry.logprob:.4f}",
            f"{math.exp(entry.logprob):.1%}",
            str(entry.rank),
            "  ".join(others),
        )
        table.add_row(*map(Text, cells))
    output_console().print(table)


def _shown(token_id: int, tokenizer: Tokenizer | None) -> str:
    """The token in quotes, as Python would write it, or its id."""
    if tokenizer is None:
        return str(token_id)
    return repr(tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
