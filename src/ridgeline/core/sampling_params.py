"""How the next token is chosen, and when a request ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.checks import check_float, check_int
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.kv_compression import KVCompression
from ridgeline.core.kv_reuse import Marked, SegmentReuse, check_reuse, read_segments
from ridgeline.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 128
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRING_CHARS = 1024
MAX_LOGIT_BIASES = 4096
MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; every bound is checked at construction.

    Attributes:
        n: independent completions of the prompt.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_k: keep the k most likely tokens; 0 or −1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: drop tokens below this share of the most likely token's probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in
            the prompt or the output (Keskar et al. 2019).
        presence_penalty: subtracted once from the logits of tokens already in the output.
        frequency_penalty: subtracted for each time that a token is in the output.
        logit_bias: added to the logits of these token ids, −100 to 100.
        seed: the same seed gives the same text, whatever else is in the batch; ``None`` draws one.
        max_tokens: output length limit (default: the context's end); that is a finish_reason of
            "length" as well.
        min_tokens: before this many, end-of-sequence and stop tokens are impossible, and stop
            strings do not end the output.
        stop: strings at which the output ends.
        stop_token_ids: tokens at which the output ends, beside the model's own.
        ignore_eos: the model's end-of-sequence tokens are ordinary tokens.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: report the chosen token's log-probability and this many alternatives.
        prompt_logprobs: the same for each prompt token but the first.
        structured_outputs: what the output must be: {"json": schema}, {"regex": pattern},
            {"choice": [texts]}, {"grammar": Lark} or {"format": name}.
        kv_compression: which tokens stay in the KV cache: {"window": tokens, "sinks": tokens}, or
            {"method": "snapkv", "budget": tokens}.
        segments: documents in the prompt, as texts or token ids, whose KV may be taken from where
            it was computed before, wherever they stand.
        segment_reuse: of each of them so many first tokens are computed all the same; with "all"
            nothing changes.

    Log-probabilities are those of the raw model, before penalties, temperature and truncation.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_compression: KVCompression | None = None
    segments: tuple[Marked, ...] = ()
    segment_reuse: SegmentReuse = "all"

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_SAMPLES)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, -1, MAX_TOKENS)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_int("seed", self.seed, 0, MAX_SEED, optional=True)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS, optional=True)
        check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false.")
        self._check_collections()
        object.__setattr__(
            self, "structured_outputs", StructuredOutputs.of(self.structured_outputs)
        )
        object.__setattr__(self, "kv_compression", KVCompression.of(self.kv_compression))
        object.__setattr__(self, "segments", read_segments(self.segments))
        check_reuse(self.segment_reuse)
        if self.segment_reuse != "all" and not self.segments:
            raise InvalidRequestError("segment_reuse is of segments, and there are none.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})."
            )

    def _check_collections(self) -> None:
        stop = _as_tuple("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        object.__setattr__(self, "stop", stop)
        ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(ids)} entries; {MAX_STOP_TOKEN_IDS} at most."
            )
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop has {len(stop)} strings; {MAX_STOP_STRINGS} at most.")
        for text in stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"Each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters."
                )
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id, 0, MAX_TOKENS)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, {MAX_LOGIT_BIASES} entries at most."
            )
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias token id", token_id, 0, MAX_TOKENS)
            check_float("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    """A list, a tuple, or nothing (``None``) as a tuple."""
    if values is None:
        return ()
    if not isinstance(values, list | tuple):
        raise InvalidRequestError(f"{name} must be a list.")
    return tuple(values)
