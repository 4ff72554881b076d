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
from ridgeline.core.sampling_params import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_TOKENS,
    SamplingParams,
)


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

    Raises:
        InvalidRequestError: a value is out of bounds.
    """

    beam_width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: float

    def score(self, length_penalty: float) -> float:
        return self.logprob / float(len(self.token_ids) ** length_penalty)


@dataclass(slots=True)
class BeamSearch:
    """The beams of one prompt: those that go on, and the best of those that have ended.

    The rules are those of transformers: of the 2·width best candidates, an end counts if it is
    among the width best, and the search goes on until no live beam could be better than the worst
    finished one.
    """

    prompt_ids: tuple[int, ...]
    params: BeamParams
    eos_token_ids: frozenset[int]
    max_tokens: int
    live: list[_Beam] = field(default_factory=lambda: [_Beam((), 0.0)])
    finished: list[_Beam] = field(default_factory=list)

    def prompts(self) -> list[list[int]]:
        """What the next step completes by one token each."""
        return [[*self.prompt_ids, *beam.token_ids] for beam in self.live]

    def advance(self, tops: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Take the most likely next tokens of each live beam, with their log-probabilities."""
        width = self.params.beam_width
        candidates = [
            _Beam((*beam.token_ids, token), beam.logprob + logprob)
            for beam, top in zip(self.live, tops, strict=True)
            for token, logprob in top
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        live: list[_Beam] = []
        for rank, beam in enumerate(candidates[: 2 * width]):
            if beam.token_ids[-1] not in self.eos_token_ids:
                live.append(beam)
            elif rank < width:
                self.finished.append(beam)
        self.live = live[:width]
        self._keep_best()
        if not self.live or len(self.live[0].token_ids) >= self.max_tokens:
            self.finished += self.live
            self._keep_best()
            self.live = []
        elif len(self.finished) == width and self._best_live() <= self._score(self.finished[-1]):
            self.live = []

    def _score(self, beam: _Beam) -> float:
        return beam.score(self.params.length_penalty)

    def _best_live(self) -> float:
        return max(map(self._score, self.live))

    def _keep_best(self) -> None:
        self.finished.sort(key=lambda beam: -self._score(beam))
        del self.finished[self.params.beam_width :]


def beam_search(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamParams,
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> list[list[tuple[tuple[int, ...], float]]]:
    """The best continuations of each prompt, best first, with their log-probabilities.

    They end where the context does, prompt included, if not before.
    """
    searches = [
        BeamSearch(
            tuple(prompt),
            params,
            eos_token_ids,
            max_tokens=min(params.max_tokens, max_model_len - len(prompt)),
        )
        for prompt in prompts
    ]
    wanted = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True
    )
    while open_searches := [search for search in searches if search.live]:
        outputs = iter(
            generate([ids for search in open_searches for ids in search.prompts()], wanted)
        )
        for search in open_searches:
            tops = []
            for _ in search.live:
                logprobs = next(outputs).outputs[0].logprobs
                assert logprobs, "a step gave no token"
                tops.append(logprobs[0].top)
            search.advance(tops)
    return [[(beam.token_ids, beam.logprob) for beam in search.finished] for search in searches]


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
    return replace(output, outputs=tuple(ranked))


def as_completion(
    index: int, text: str, token_ids: tuple[int, ...], logprob: float, *, ended: bool
) -> CompletionOutput:
    """A finished beam as an output."""
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        cumulative_logprob=logprob,
    )
