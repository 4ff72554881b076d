"""A request from its arrival to its outcome."""

import time
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from ridgeline.core.request import CompletionChunk, Request, RequestOutput, RequestTimings
from ridgeline.core.result import TokenLogprobs
from ridgeline.engine.sample_output import SampleOutput
from ridgeline.scheduler import Sequence, SequenceUpdate
from ridgeline.text import Tokenizer


class RequestState:
    """Joins the n samples of a request, its prompt's log-probabilities, and its times."""

    def __init__(
        self,
        request: Request,
        sequences: Seq[Sequence],
        tokenizer: Tokenizer | None,
        prompt: str | None,
    ) -> None:
        self.request = request
        self.sequences = sequences
        self._prompt = prompt
        self._samples = [SampleOutput(sequence, tokenizer) for sequence in sequences]
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._logits: npt.NDArray[np.float32] | None = None
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
        self._last_token_s = time.monotonic()
        if update.new_token_ids and self._first_token_s is None:
            self._first_token_s = self._last_token_s
        for offset, entry in enumerate(update.result.prompt_logprobs):
            self._prompt_logprobs[update.start + offset + 1] = entry
        if update.result.logits is not None:
            self._take_logits(update.start, update.result.logits)
        return self._samples[update.sequence.sample_index].push(update)

    def prompt_logits(self) -> npt.NDArray[np.float32]:
        """Logits of the whole prompt, float32 ``[tokens, vocabulary]``, if they were wanted."""
        assert self._logits is not None
        return self._logits

    def _take_logits(self, start: int, logits: npt.NDArray[np.float32]) -> None:
        """Chunks may come again, cut differently, after a preemption."""
        if self._logits is None:
            shape = (len(self.request.prompt_token_ids), logits.shape[1])
            self._logits = np.empty(shape, dtype=np.float32)
        self._logits[start : start + len(logits)] = logits

    def output(self) -> RequestOutput:
        """The outcome so far; timings once it is finished."""
        num_prompt = len(self.request.prompt_token_ids)
        wants_prompt = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(sample.output() for sample in self._samples),
            finished=self.is_finished,
            prompt_logprobs=(
                tuple(self._prompt_logprobs.get(position) for position in range(num_prompt))
                if wants_prompt
                else None
            ),
            num_cached_tokens=self.sequences[0].num_cached_tokens or 0,
            timings=self._timings() if self.is_finished else None,
        )

    def _timings(self) -> RequestTimings:
        arrival = self.request.arrival_s
        end_to_end = self._last_token_s - arrival
        tokens = max(sequence.num_output_tokens for sequence in self.sequences)
        ttft = None if self._first_token_s is None else self._first_token_s - arrival
        return RequestTimings(
            queue_s=(self._started_s or self._last_token_s) - arrival,
            ttft_s=ttft,
            tpot_s=None if ttft is None or tokens < 2 else (end_to_end - ttft) / (tokens - 1),
            end_to_end_s=end_to_end,
        )
