"""A request from its arrival to its outcome."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ridgeline.core.errors import EngineError, OverloadedError
from ridgeline.core.request import (
    CompletionChunk,
    FinishReason,
    PromptReport,
    Request,
    RequestOutput,
    RequestTimings,
)
from ridgeline.core.result import TokenLogprobs
from ridgeline.engine.sample_output import SampleOutput
from ridgeline.scheduler import Sequence, SequenceUpdate
from ridgeline.text import Tokenizer

_SHED_RETRY_S = 1.0


class RequestState:
    """Joins the n samples of a request, its prompt's log-probabilities, and its times."""

    def __init__(
        self,
        request: Request,
        sequences: Seq[Sequence],
        tokenizer: Tokenizer | None,
        prompt: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.sequences = sequences
        self._prompt = prompt
        self._clock = clock
        self._samples = [SampleOutput(sequence, tokenizer) for sequence in sequences]
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._logits: npt.NDArray[np.float32] | None = None
        self._pooled: npt.NDArray[np.float32] | None = None
        self._is_reported = False
        self._ended: set[int] = set()  # samples whose last chunk was given out
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s = request.arrival_s

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def note_start(self, started_s: float) -> None:
        """A step that began at ``started_s`` computed something of this request."""
        if self._started_s is None:
            self._started_s = started_s

    def apply(self, update: SequenceUpdate) -> tuple[CompletionChunk, bool]:
        """Take what a step did for one sample; see `SampleOutput.push`."""
        self._last_token_s = self._clock()
        if update.new_token_ids and self._first_token_s is None:
            self._first_token_s = self._last_token_s
        for offset, entry in enumerate(update.result.prompt_logprobs):
            self._prompt_logprobs[update.start + offset + 1] = entry
        if update.result.logits is not None:
            self._take_logits(update.start, update.result.logits)
        if update.result.pooled is not None:
            self._pooled = update.result.pooled
        chunk, stopped = self._samples[update.sequence.sample_index].push(update)
        if not self._is_reported and (chunk.token_ids or chunk.finish_reason):
            self._is_reported = True
            chunk = replace(chunk, prompt=self._prompt_report())
        if chunk.finish_reason:
            self._ended.add(chunk.index)
        return chunk, stopped

    def fail(self, sequence: Sequence) -> CompletionChunk:
        """The last chunk of a sample whose output could not be made."""
        self._samples[sequence.sample_index].failed = True
        return self._end_chunk(sequence, FinishReason.ERROR)

    def unreported_ends(self) -> list[CompletionChunk]:
        """Last chunks of samples that ended with another, before they were computed at all."""
        return [
            self._end_chunk(sequence, sequence.finish_reason)
            for sequence in self.sequences
            if sequence.sample_index not in self._ended
        ]

    def _end_chunk(self, sequence: Sequence, reason: FinishReason | None) -> CompletionChunk:
        self._ended.add(sequence.sample_index)
        return CompletionChunk(
            request_id=self.request.request_id,
            index=sequence.sample_index,
            text="",
            token_ids=(),
            finish_reason=reason,
        )

    def prompt_logits(self) -> npt.NDArray[np.float32]:
        """Logits of the whole prompt, float32 ``[tokens, vocabulary]``, if they were wanted."""
        assert self._logits is not None
        return self._logits

    def pooled(self) -> npt.NDArray[np.float32]:
        """One vector of the prompt's hidden states, float32 ``[hidden]``, if it was wanted.

        Raises:
            OverloadedError: a full queue gave the request's place to another.
            EngineError: it ended in another way before its prompt was computed.
        """
        if self._pooled is None:
            if self.sequences[0].finish_reason is FinishReason.SHED:
                raise OverloadedError(
                    "The queue is full of more urgent requests.", retry_after_s=_SHED_RETRY_S
                )
            raise EngineError("The prompt was not computed to its end.")
        return self._pooled

    def _take_logits(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Chunks may come again, cut differently, after a preemption."""
        if self._logits is None:
            shape = (len(self.request.prompt_token_ids), logits.shape[1])
            self._logits = np.empty(shape, dtype=np.float32)
        self._logits[start : start + len(logits)] = logits

    def output(self) -> RequestOutput:
        """The outcome so far; timings once it is finished."""
        report = self._prompt_report()
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(sample.output() for sample in self._samples),
            finished=self.is_finished,
            prompt_logprobs=report.logprobs,
            num_cached_tokens=report.num_cached_tokens,
            timings=self.timings() if self.is_finished else None,
        )

    def _prompt_report(self) -> PromptReport:
        num_tokens = len(self.request.prompt_token_ids)
        logprobs = None
        if self.request.params.prompt_logprobs is not None:
            logprobs = tuple(self._prompt_logprobs.get(position) for position in range(num_tokens))
        return PromptReport(
            num_tokens=num_tokens,
            num_cached_tokens=min(num_tokens, self.sequences[0].num_cached_tokens or 0),
            logprobs=logprobs,
        )

    def timings(self) -> RequestTimings:
        """Seconds of a request that is finished."""
        arrival = self.request.arrival_s
        end_to_end = self._last_token_s - arrival
        tokens = max(sample.num_tokens for sample in self._samples)
        ttft = None if self._first_token_s is None else self._first_token_s - arrival
        return RequestTimings(
            queue_s=(self._started_s or self._last_token_s) - arrival,
            ttft_s=ttft,
            tpot_s=None if ttft is None or tokens < 2 else (end_to_end - ttft) / (tokens - 1),
            end_to_end_s=end_to_end,
        )
