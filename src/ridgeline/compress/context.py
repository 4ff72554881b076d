"""Context distillation: an adapter answers as the model does behind a fixed prompt, without it.

The model writes questions and answers with the prompt; the adapter learns the distributions of
those answers (Kujanpää et al. 2024, arXiv 2412.14964), and on other text those of the model as it
is. Shapes: A tokens of an answer, V vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.compress.adapters import AdaptedModel
from ridgeline.compress.batches import WindowStream
from ridgeline.compress.block_model import Sequences
from ridgeline.compress.distill import divergences
from ridgeline.compress.pretrain import LossFunction, autocast
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.evaluation import Document

if TYPE_CHECKING:
    from ridgeline.engine.llm import LLM

Logits = Callable[[Sequences], Tensor]
"""Logits ``[T, V]`` of sequences, one behind the other."""

UNRELATED_SHARE = 0.2  # of the batches
_ASK = "Ask one short question about what you were told above."
_QUESTION_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its answer, behind the context and bare; token ids."""

    prompted: Document
    bare: Document
    answer: Document


def write_examples(
    llm: "LLM",
    context: str,
    questions: Sequence[str],
    *,
    num_questions: int,
    answer_tokens: int,
    seed: int,
) -> list[Example]:
    """What the model answers with the context, sampled; without ``questions`` it asks them, too.

    Of a model with a chat template the context is the system message, of others text before the
    question.

    Raises:
        InvalidRequestError: the model asks nothing, or answers nothing.
        ContextLengthError: context and question leave no room for an answer.
    """
    prompted = [] if questions else [_rendered(llm, context, _ASK)]
    if not questions:
        params = [
            SamplingParams(max_tokens=_QUESTION_TOKENS, temperature=1.0, seed=seed + number)
            for number in range(num_questions)
        ]
        outputs = llm.generate(prompted * num_questions, params)
        asked = (output.outputs[0].text.strip() for output in outputs)
        questions = sorted({text for text in asked if text})
    prompts = [_rendered(llm, context, question) for question in questions]
    answers = llm.generate(
        prompts,
        [
            SamplingParams(max_tokens=answer_tokens, temperature=1.0, seed=seed + number)
            for number in range(len(prompts))
        ],
    )
    examples = [
        Example(
            prompted=tuple(prompt),
            bare=tuple(_rendered(llm, "", question)),
            answer=tuple(output.outputs[0].token_ids),
        )
        for prompt, question, output in zip(prompts, questions, answers, strict=True)
        if output.outputs[0].token_ids
    ]
    if len(examples) < 2:
        raise InvalidRequestError(
            "The model wrote fewer than two questions with answers: give some by --questions."
        )
    return examples


def digest(examples: Sequence[Example]) -> str:
    """SHA-256 of their tokens."""
    tokens = [(each.prompted, each.bare, each.answer) for each in examples]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


class ExampleStream:
    """Batches of examples, by their numbers, and of windows of other text.

    A batch is ``(numbers, [])`` or ``(ids, next ids)`` of windows.
    """

    def __init__(
        self, examples: Sequence[Example], unrelated: WindowStream, micro_batch_tokens: int
    ) -> None:
        longest = max(len(each.prompted) + len(each.answer) for each in examples)
        self.length_tokens = min(micro_batch_tokens, longest)
        self._num, self._unrelated = len(examples), unrelated
        self._tokens = micro_batch_tokens

    def batch(self, *, number: int, num_windows: int) -> tuple[Tensor, Tensor]:
        every = round(1 / UNRELATED_SHARE)
        if number % every == every - 1:
            windows = max(1, self._tokens // self._unrelated.length_tokens)
            return self._unrelated.batch(number=number // every, num_windows=windows)
        first = (number - number // every) * num_windows
        order = [
            int(np.random.default_rng((self._num, index // self._num)).permutation(self._num)[
                index % self._num
            ])
            for index in range(first, first + num_windows)
        ]  # fmt: skip
        return torch.tensor(order), torch.empty(0)


def context_loss(
    model: AdaptedModel, examples: Sequence[Example], dtype: torch.dtype
) -> LossFunction:
    """Mean KL in nats: of answers to the prompted model, of other text to the model as it is."""

    def loss(ids: Tensor, _: Tensor) -> Tensor:
        with autocast(dtype):
            if ids.ndim == 1:
                return answer_divergence(
                    model.base, model.adapted, [examples[number] for number in ids.tolist()]
                )
            return text_divergence(model.base, model.adapted, ids.tolist())

    return loss


@torch.no_grad()
def measured_divergences(
    model: AdaptedModel, examples: Sequence[Example], other: Sequences
) -> tuple[float, float, float]:
    """In float32: of answers without context, of those with the adapter, and of other text."""
    bare = float(answer_divergence(model.base, model.base, examples))
    found = float(answer_divergence(model.base, model.adapted, examples))
    return bare, found, float(text_divergence(model.base, model.adapted, other))


def answer_divergence(base: Logits, adapted: Logits, examples: Sequence[Example]) -> Tensor:
    """Mean over the answers' tokens of KL(base behind the context ‖ adapted without it)."""
    with torch.no_grad():
        wanted = _answer_logits(base, [(each.prompted, each.answer) for each in examples])
    got = _answer_logits(adapted, [(each.bare, each.answer) for each in examples])
    return _mean_divergence(wanted, got)


def text_divergence(base: Logits, adapted: Logits, sequences: Sequences) -> Tensor:
    """Mean of KL(base ‖ adapted) over the tokens of texts."""
    with torch.no_grad():
        wanted = base(sequences)
    got = adapted(sequences)
    return _mean_divergence(wanted, got)


def _mean_divergence(wanted_TV: Tensor, got_TV: Tensor) -> Tensor:
    wanted, got = (functional.log_softmax(each.float(), -1) for each in (wanted_TV, got_TV))
    return divergences(wanted, got).mean()


def _answer_logits(model: Logits, pairs: Sequence[tuple[Document, Document]]) -> Tensor:
    """Logits ``[A, V]`` of every token of the answers, from the tokens before each."""
    logits = model([(*prompt, *answer) for prompt, answer in pairs])
    rows, first = [], 0
    for prompt, answer in pairs:
        start = first + len(prompt) - 1
        rows.append(logits[start : start + len(answer)])
        first += len(prompt) + len(answer)
    return torch.cat(rows)


def _rendered(llm: "LLM", context: str, question: str) -> list[int]:
    assert llm.tokenizer is not None
    if llm.chat_template is None:
        return llm.tokenizer.encode(f"{context}\n{question}\n" if context else f"{question}\n")
    system = [{"role": "system", "content": context}] if context else []
    return llm.encode_chat([*system, {"role": "user", "content": question}])
