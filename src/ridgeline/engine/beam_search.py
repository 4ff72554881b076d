"""Beam search, and the best of several samples.

Each step asks for one token after every beam, all in one batch. Beams that share a prefix share its
KV blocks through the prefix cache, whose tokens are verified; only the tokens of a beam's last,
unfinished block are computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ridgeline.core.checks import check_float, check_int
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import CompletionOutput, FinishReason, RequestOutput
from ridgeline.core.result import TokenLogprobs
from ridgeline.core.sampling_params import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_TOKENS,
    SamplingParams,
)
from ridgeline.text import IncrementalDetokenizer, Tokenizer

MAX_BEAMS = MAX_LOGPROBS // 2  # a step asks for two tokens of each


class Generate(Protocol):
    """Completes several prompts in one batch."""

    def __call__(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Sequence[RequestOutput]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Settings of a beam search.

    Attributes:
        beam_width: continuations that are followed at once, and that are returned.
        max_tokens: output length limit.
        length_penalty: a beam's score is its log-probability over its length to this power.
        ignore_eos: the model's end-of-sequence tokens are ordinary tokens.
        logprobs: log-probabilities of each token and of so many alternatives.

    Raises:
        InvalidRequestError: a value is out of bounds.
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_BEAMS)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def of_step(self) -> SamplingParams:
        """What a step asks for after each beam."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=max(2 * self.beam_width, self.logprobs or 0),
            ignore_eos=True,
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens after the prompt, the log-probability of all of them, and that of each."""

    token_ids: tuple[int, ...]
    logprob: float
    logprobs: tuple[TokenLogprobs, ...]

    def score(self, length_penalty: float) -> float:
        return self.logprob / float(len(self.token_ids) ** length_penalty)


@dataclass(slots=True)
class BeamSearch:
    """The beams of one prompt: those that go on, and the best of those that have ended.

    The rules are those of transformers: of the 2·width best candidates, an end counts if it is
    among the width best, and the search goes on until no live beam could be better than the worst
    finished one. The context ends it, prompt included, if nothing does before.
    """

    prompt_ids: tuple[int, ...]
    params: BeamParams
    eos_token_ids: frozenset[int]
    max_model_len: int
    live: list[Beam] = field(default_factory=lambda: [Beam((), 0.0, ())])
    finished: list[Beam] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.ignore_eos:
            self.eos_token_ids = frozenset()

    def prompts(self) -> list[tuple[int, ...]]:
        """What the next step completes by one token each."""
        return [(*self.prompt_ids, *beam.token_ids) for beam in self.live]

    def advance(self, steps: Sequence[TokenLogprobs]) -> None:
        """Take the most likely next tokens of each live beam, with their log-probabilities."""
        width = self.params.beam_width
        candidates = [
            (beam.logprob + logprob, beam, step, rank)
            for beam, step in zip(self.live, steps, strict=True)
            for rank, (_, logprob) in enumerate(step.top[: 2 * width])
        ]
        candidates.sort(key=lambda each: -each[0])
        live: list[Beam] = []
        for place, (logprob, parent, step, rank) in enumerate(candidates[: 2 * width]):
            beam = self._longer(parent, step, rank, logprob)
            if not self.has_ended(beam):
                live.append(beam)
            elif place < width:
                self.finished.append(beam)
        self.live = live[:width]
        self._keep_best()
        if not self.live or len(self.live[0].token_ids) >= self._max_tokens:
            self.finished += self.live
            self._keep_best()
            self.live = []
        elif len(self.finished) == width and self._best_live() <= self._score(self.finished[-1]):
            self.live = []

    def has_ended(self, beam: Beam) -> bool:
        """Whether its last token is an end, rather than that of the limit."""
        return beam.token_ids[-1] in self.eos_token_ids

    def text(
        self, beam: Beam, tokenizer: Tokenizer | None, *, skip_special_tokens: bool = True
    ) -> str:
        """What a beam adds to the prompt's text, without that of an end."""
        if tokenizer is None:
            return ""
        detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, context_ids=self.prompt_ids
        )
        shown = beam.token_ids[:-1] if self.has_ended(beam) else beam.token_ids
        return detokenizer.push(shown) + detokenizer.finish()

    @property
    def _max_tokens(self) -> int:
        return min(self.params.max_tokens, self.max_model_len - len(self.prompt_ids))

    def _longer(self, parent: Beam, step: TokenLogprobs, rank: int, logprob: float) -> Beam:
        token_id, own = step.top[rank]
        entries = parent.logprobs
        if (count := self.params.logprobs) is not None:
            entry = TokenLogprobs(
                token_id=token_id, logprob=own, rank=rank + 1, top=step.top[:count]
            )
            entries = (*entries, entry)
        return Beam((*parent.token_ids, token_id), logprob, entries)

    def _score(self, beam: Beam) -> float:
        return beam.score(self.params.length_penalty)

    def _best_live(self) -> float:
        return max(map(self._score, self.live))

    def _keep_best(self) -> None:
        self.finished.sort(key=lambda beam: -self._score(beam))
        del self.finished[self.params.beam_width :]


def beam_search(generate: Generate, searches: Sequence[BeamSearch]) -> None:
    """Run searches to their ends, a step of all beams of all of them at a time."""
    while open_searches := [search for search in searches if search.live]:
        wanted = open_searches[0].params.of_step
        outputs = iter(
            generate([[*ids] for search in open_searches for ids in search.prompts()], wanted)
        )
        for search in open_searches:
            steps = []
            for _ in search.live:
                logprobs = next(outputs).outputs[0].logprobs
                assert logprobs, "a step gave no token"
                steps.append(logprobs[0])
            search.advance(steps)


def best_of(output: RequestOutput, count: int) -> RequestOutput:
    """The ``count`` samples with the highest mean log-probability, best first.

    Raises:
        InvalidRequestError: the samples have no log-probabilities, or ``count`` is less than 1.
    """
    check_int("count", count, 1, MAX_SAMPLES)

    def mean(sample: CompletionOutput) -> float:
        if sample.cumulative_logprob is None:
            raise InvalidRequestError("Samples are ranked by log-probability: set logprobs=0.")
        return sample.cumulative_logprob / max(1, len(sample.token_ids))

    ranked = sorted(output.outputs, key=mean, reverse=True)[:count]
    shown = (replace(sample, index=index) for index, sample in enumerate(ranked))
    return replace(output, outputs=tuple(shown))


def as_completions(search: BeamSearch, tokenizer: Tokenizer | None) -> tuple[CompletionOutput, ...]:
    """The finished beams as outputs, best first."""
    return tuple(
        CompletionOutput(
            index=index,
            text=search.text(beam, tokenizer),
            token_ids=beam.token_ids,
            finish_reason=finish_reason(search, beam),
            logprobs=None if search.params.logprobs is None else beam.logprobs,
            cumulative_logprob=beam.logprob,
        )
        for index, beam in enumerate(search.finished)
    )


def finish_reason(search: BeamSearch, beam: Beam) -> FinishReason:
    """Why a finished beam ended."""
    return FinishReason.STOP if search.has_ended(beam) else FinishReason.LENGTH
