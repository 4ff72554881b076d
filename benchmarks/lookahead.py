"""Tokens a verification with lookahead decoding, and with one of its two sources of n-grams alone.

``python -m benchmarks.lookahead`` prints the table of docs/decoding.md, in about a minute.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from ridgeline import LLM, SamplingParams
from ridgeline.decoding.drafters import LookaheadDrafter, lookahead

PROMPTS = [
    "import os\nimport sys\n\ndef main(",
    "class Stack:\n    def __init__(self",
    "def read_file(path):\n",
    "for i in range(10):\n",
    "    def test_get(self):\n        ",
]
LENGTHS = (4, 8, 15, 31)
NUM_TOKENS = 128
_go_on = LookaheadDrafter._go_on


def _without_text(drafter: LookaheadDrafter, state: Any, token_ids: Sequence[int]) -> None:
    with patch.object(lookahead, "_note", lambda *_: None):
        _go_on(drafter, state, token_ids)


SOURCES: dict[str, AbstractContextManager[object]] = {
    "whole": nullcontext(),
    "the text's n-grams alone": patch.object(LookaheadDrafter, "see_drawn", lambda *_: None),
    "the window's alone": patch.object(LookaheadDrafter, "_go_on", _without_text),
}


def tokens_a_pass(num_drafts: int, temperature: float) -> float:
    """Of the embedded model's own texts, with trees of so many drafts."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=1, ignore_eos=True)
    settings: dict[str, Any] = {"speculation": "lookahead", "draft_shape": "tree"}
    with LLM(num_speculative_tokens=num_drafts, **settings) as llm:
        outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params)]
    num_passes = sum(NUM_TOKENS - sum(output.num_accepted) for output in outputs)
    return NUM_TOKENS * len(PROMPTS) / num_passes


def main() -> None:
    """Print the table."""
    print("| T | | " + " | ".join(map(str, LENGTHS)) + " |\n|" + "---|" * (2 + len(LENGTHS)))
    for temperature in (0.0, 0.7):
        for name, alone in SOURCES.items():
            with alone:
                found = [tokens_a_pass(length, temperature) for length in LENGTHS]
            print(f"| {temperature:g} | {name} | " + " | ".join(f"{n:.2f}" for n in found) + " |")


if __name__ == "__main__":
    main()
