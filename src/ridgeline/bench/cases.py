"""What `ridgeline bench` measures: prompts, decode steps of a batch at a context, and tokens that
are decoded without a KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.errors import ContextLengthError
from ridgeline.core.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """One prompt of ``prompt_tokens`` random tokens, from an empty cache to its first output."""

    prompt_tokens: int

    @property
    def name(self) -> str:
        return f"prefill {self.prompt_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """Steps that compute one token of each of ``batch`` sequences, ``context`` tokens behind it."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        suffix = f" at {self.context}" if self.context else ""
        return f"decode {self.batch}{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCase:
    """One token of one sequence, ``context`` tokens behind it, all of which are computed again."""

    batch: ClassVar[int] = 1
    context: int

    @property
    def prompt_tokens(self) -> int:
        return max(self.context, 1) + 1

    @property
    def name(self) -> str:
        return f"{DecodeCase(batch=self.batch, context=self.context).name}, no KV cache"


Case = PrefillCase | DecodeCase | RecomputeCase


def make_cases(
    prompts: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    reuse_kv: bool = True,
) -> tuple[Case, ...]:
    """One case for each prompt length, and one for each batch at each context.

    Without ``reuse_kv`` there is one sequence at each context beside them, with and without a KV
    cache.
    """
    prefills = tuple(PrefillCase(prompt_tokens=prompt) for prompt in prompts)
    if not reuse_kv:
        batches = sorted({*batches, RecomputeCase.batch})
    decodes = tuple(DecodeCase(batch=batch, context=at) for at in contexts for batch in batches)
    anew = () if reuse_kv else tuple(RecomputeCase(context=at) for at in contexts)
    return (*prefills, *decodes, *anew)


def positions(case: Case, decode_steps: int) -> int:
    """KV positions that each sequence of the case needs."""
    if not isinstance(case, DecodeCase):
        return case.prompt_tokens
    return max(case.context, 1) + decode_steps


def check_cases(cases: Sequence[Case], spec: ModelSpec, decode_steps: int) -> None:
    """Refuse what the model has no positions for.

    Raises:
        ContextLengthError: a case is too long; the message names it.
    """
    for case in cases:
        needed = positions(case, decode_steps)
        if needed > spec.max_position:
            raise ContextLengthError(
                f"Case {case.name!r} needs {needed} positions, and the model has "
                f"{spec.max_position}."
            )
