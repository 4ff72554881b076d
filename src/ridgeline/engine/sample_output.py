"""One sample's way from tokens to text."""

from collections.abc import Sequence as Seq

from msgspec.structs import replace

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import CompletionChunk, CompletionOutput, FinishReason
from ridgeline.core.result import TokenLogprobs
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.scheduler import Sequence, SequenceUpdate
from ridgeline.text import IncrementalDetokenizer, StopStringMatcher, Tokenizer


class SampleOutput:
    """Collects the tokens, text and log-probabilities of one sequence.

    A token that ends the output is in ``token_ids``, but in the text only if stops are included.
    What another engine made of it is there from the start.

    Raises:
        InvalidRequestError: in that there is a stop string.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        request = sequence.request
        self.sequence = sequence
        self._detokenizer, self._stops = _readers(
            request.params, tokenizer, request.prompt_token_ids
        )
        self._token_ids = list(request.output_token_ids)
        self._text = _read(self._token_ids, self._detokenizer, self._stops, request.params)
        if self._matched is not None:
            raise InvalidRequestError("The output that is to go on has ended.")
        self._logprobs: list[TokenLogprobs] = []
        self._stop_reason: str | int | None = None
        self.failed = False  # its output could not be made

    @property
    def num_tokens(self) -> int:
        """Tokens that were made here: none that a step gave after a stop string."""
        return len(self._token_ids) - len(self.sequence.request.output_token_ids)

    def push(self, update: SequenceUpdate) -> tuple[CompletionChunk, bool]:
        """Take a step's tokens. Returns the chunk, and whether it completed a stop string."""
        sequence, tokens = self.sequence, update.new_token_ids
        goes_on = self._stops is None and not sequence.is_finished  # as nearly always
        if goes_on:
            text = self._detokenizer.push(tokens) if self._detokenizer else ""
        else:
            tokens, text = self._take(tokens)
        matched = self._matched
        self._stop_reason = sequence.stop_reason if matched is None else matched
        logprobs = update.result.logprobs[: len(tokens)]
        self._text.append(text)
        self._token_ids.extend(tokens)
        self._logprobs.extend(logprobs)
        chunk = CompletionChunk(
            request_id=sequence.request.request_id,
            index=sequence.sample_index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=None if goes_on else self._finish_reason,
            stop_reason=self._stop_reason,
        )
        if chunk.finish_reason is not None:
            drafts = sequence.drafts
            chunk = replace(
                chunk,
                num_drafted=sum(drafts.drafted_by_rank),
                num_accepted=sum(drafts.accepted_by_rank),
            )
        return chunk, matched is not None

    @property
    def _matched(self) -> str | None:
        return self._stops.matched if self._stops else None

    @property
    def _finish_reason(self) -> FinishReason | None:
        """A stop string wins over whatever else ended the sequence in the same step."""
        if self.failed:
            return FinishReason.ERROR
        return self.sequence.finish_reason if self._matched is None else FinishReason.STOP

    def _take(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The tokens up to the one that completes a stop string, and their text.

        It is all the rest of the text if the sequence has ended.
        """
        text = ""
        finished = self.sequence.is_finished
        hidden = 1 if finished and self._hides_end() else 0
        before = len(self._token_ids)
        for count, token in enumerate(tokens[: len(tokens) - hidden], start=1):
            text += self._until_stop(self._detokenize(token), before + count)
            if self._matched is not None:
                return tokens[:count], text
        return tokens, text + self._flush(before + len(tokens)) if finished else text

    def _until_stop(self, text: str, num_tokens: int) -> str:
        """Text up to a stop string; until there are more than ``min_tokens``, none counts."""
        if self._stops is None:
            return text
        min_tokens = self.sequence.request.params.min_tokens
        return self._stops.push(text, may_stop=num_tokens > min_tokens)

    def output(self) -> CompletionOutput:
        """All of it so far."""
        wants_logprobs = self.sequence.request.params.logprobs is not None
        drafts = self.sequence.drafts
        return CompletionOutput(
            index=self.sequence.sample_index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs) if wants_logprobs else None,
            num_drafted=tuple(drafts.drafted_at),
            num_accepted=tuple(drafts.accepted_at),
            num_accepted_by_rank=tuple(drafts.accepted_by_rank),
            cumulative_logprob=(
                sum(entry.logprob for entry in self._logprobs) if wants_logprobs else None
            ),
        )

    def _hides_end(self) -> bool:
        """Whether the token that ended the output stays out of the text.

        A grammar ends an output with a token that is part of it.
        """
        sequence = self.sequence
        request, params = sequence.request, sequence.request.params
        return (
            sequence.finish_reason is FinishReason.STOP
            and not params.include_stop_str_in_output
            and sequence.token_ids[-1] in (*request.eos_token_ids, *params.stop_token_ids)
        )

    def _detokenize(self, token: int) -> str:
        return self._detokenizer.push([token]) if self._detokenizer else ""

    def _flush(self, num_tokens: int) -> str:
        text = self._until_stop(self._detokenizer.finish(), num_tokens) if self._detokenizer else ""
        return text + self._stops.flush() if self._stops else text


def text_pieces(
    token_ids: Seq[int], params: SamplingParams, tokenizer: Tokenizer | None, prompt: Seq[int]
) -> list[str]:
    """What a `SampleOutput` gives out as text for each of the first tokens of an output."""
    return _read(token_ids, *_readers(params, tokenizer, prompt), params)


_Readers = tuple[IncrementalDetokenizer | None, StopStringMatcher | None]


def _readers(params: SamplingParams, tokenizer: Tokenizer | None, prompt: Seq[int]) -> _Readers:
    """What makes tokens into text, and what finds the stop strings in it."""
    detokenizer = stops = None
    if tokenizer is not None:
        detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, context_ids=prompt
        )
    if params.stop:
        include_stop = params.include_stop_str_in_output
        stops = StopStringMatcher(params.stop, include_stop=include_stop)
    return detokenizer, stops


def _read(
    token_ids: Seq[int],
    detokenizer: IncrementalDetokenizer | None,
    stops: StopStringMatcher | None,
    params: SamplingParams,
) -> list[str]:
    pieces = []
    for count, token in enumerate(token_ids, start=1):
        text = detokenizer.push([token]) if detokenizer else ""
        pieces.append(stops.push(text, may_stop=count > params.min_tokens) if stops else text)
    return pieces
