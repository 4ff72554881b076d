"""Recorded texts, and where in them the embedded pair's draft model is right.

A draft token depends on the tokens before it alone, so one record says for drafts of any length
which of them are accepted.
"""

import json
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ridgeline.engine.llm import LLM
from ridgeline.evaluation import heldout_texts
from ridgeline.weights import embedded_draft_folder

PATH = Path(__file__).with_name("texts.jsonl")
WORKLOADS = ("continue", "edit")
DRAFT_FORMATS = (None, "int8", "int4")
_TEXTS_EACH = 8
_PROMPT_TOKENS, _OUTPUT_TOKENS = 96, 128
_EDITED = slice(1200, 1900)  # characters of a text: behind its imports
_NAME = re.compile(r"\b[a-z_]{5,}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """Token ids; ``draft[i]`` is ``output[i]`` where the draft model guesses as the target does.

    ``draft_quantization`` is what the draft model was quantized to, or ``None``.
    """

    workload: str
    draft_quantization: str | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    draft: tuple[int, ...]

    @property
    def agreement(self) -> float:
        """Share of the output that the draft model guesses."""
        pairs = zip(self.draft, self.output, strict=True)
        return sum(a == b for a, b in pairs) / len(self.output)


def read_texts(
    workload: str, draft_quantization: str | None = None, path: Path = PATH
) -> tuple[RecordedText, ...]:
    """The recorded texts of a workload, with the guesses of a draft model in some format.

    Raises:
        ValueError: there are none.
    """
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        if (fields["workload"], fields["draft_quantization"]) == (workload, draft_quantization):
            lists = {name: tuple(fields[name]) for name in ("prompt", "output", "draft")}
            texts.append(RecordedText(**{**fields, **lists}))
    if not texts:
        raise ValueError(f"No {workload} texts are recorded for drafts in {draft_quantization}.")
    return tuple(texts)


def with_agreement(
    texts: Iterable[RecordedText], share: float, *, seed: int = 0
) -> tuple[RecordedText, ...]:
    """The same texts with a drafter that guesses this share of the output, places at random.

    Chains of n are then accepted as one of that acceptance is: share + share² + … + shareⁿ tokens.
    """
    rng = np.random.default_rng(seed)
    return tuple(
        replace(
            text,
            draft=tuple(token if rng.random() < share else token + 1 for token in text.output),
        )
        for text in texts
    )


def write_texts(texts: Iterable[RecordedText], path: Path = PATH) -> None:
    """One JSON object a line."""
    lines = (json.dumps(asdict(text), separators=(",", ":")) for text in texts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def record() -> list[RecordedText]:
    """Run the embedded pair over held-out code.

    ``continue``: the start of a text is the prompt, what follows is the output. ``edit``: a text is
    written again with one name changed. Both models read the texts, rather than write them: what
    the small target writes greedily soon repeats itself. Where their most likely tokens agree, the
    draft's guess counts as right.
    """
    found = []
    with LLM() as target:
        pairs = []
        for text in heldout_code(_TEXTS_EACH):
            tokens = _encode(target, text)[: _PROMPT_TOKENS + _OUTPUT_TOKENS]
            pairs.append(("continue", tokens[:_PROMPT_TOKENS], tokens[_PROMPT_TOKENS:]))
        for text in heldout_code(_TEXTS_EACH):
            part = text[_EDITED]
            prompt = _encode(target, f"{part}\n# The same with another name:\n")
            output = _encode(target, renamed(part))[:_OUTPUT_TOKENS]
            pairs.append(("edit", prompt, output))
        for form in DRAFT_FORMATS:
            with LLM(str(embedded_draft_folder()), quantization=form) as draft:
                for workload, prompt, output in pairs:
                    agrees = guesses(target, prompt, output) == guesses(draft, prompt, output)
                    other = [(token + 1) % target.spec.vocab_size for token in output]
                    guessed = np.where(agrees, output, other)
                    found.append(
                        RecordedText(
                            workload=workload,
                            draft_quantization=form,
                            prompt=prompt,
                            output=output,
                            draft=tuple(guessed.tolist()),
                        )
                    )
    return found


def guesses(llm: LLM, prompt: Sequence[int], output: Sequence[int]) -> npt.NDArray[np.int64]:
    """The most likely token at each place of the output."""
    logits = llm.logits([*prompt, *output])
    return np.asarray(logits[len(prompt) - 1 : -1].argmax(-1), dtype=np.int64)


def heldout_code(count: int) -> list[str]:
    """The first long texts of code that the embedded model has not seen."""
    return [text for text in heldout_texts("code") if len(text) > 2 * _EDITED.stop][:count]


def renamed(text: str) -> str:
    """The text with its most frequent long name changed."""
    names = Counter(name for name in _NAME.findall(text) if not keyword.iskeyword(name))
    name = names.most_common(1)[0][0]
    return re.sub(rf"\b{name}\b", f"{name}_2", text)


def _encode(llm: LLM, text: str) -> tuple[int, ...]:
    assert llm.tokenizer is not None
    return tuple(llm.tokenizer.encode(text))
