"""From the fields of a request to `SamplingParams`: the one way that every route takes."""

import time
from typing import Any

import msgspec

from ridgeline.core.sampling_params import MAX_SEED, SamplingParams
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.server.context import Server
from ridgeline.server.errors import bad_request
from ridgeline.server.schemas.generation import Generation, OpenAIGeneration

_COPIED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop_token_ids", "min_tokens", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "segments", "segment_reuse",
)  # fmt: skip
RANDOM_SEED = -1  # as without one
UNLIMITED_TOKENS = -1  # as without a limit


def sampling_params(
    server: Server,
    fields: Generation,
    *,
    max_tokens: int | None,
    structured: StructuredOutputs | None,
    **settings: Any,
) -> SamplingParams:
    """The settings of a request over the model's own defaults; ``settings`` come from the route.

    ``structured``: what the output must look like.

    Raises:
        ApiError, InvalidRequestError: a value is out of bounds, or values contradict each other.
    """
    values: dict[str, Any] = dict(server.engine.sampling_defaults)
    for name in _COPIED:
        if (value := getattr(fields, name)) is not None:
            values[name] = value
    if isinstance(fields, OpenAIGeneration) and fields.repeat_penalty is not None:
        if fields.repetition_penalty not in (None, fields.repeat_penalty):
            raise bad_request("repetition_penalty and repeat_penalty differ.", "repeat_penalty")
        values["repetition_penalty"] = fields.repeat_penalty
    if fields.seed is not None and fields.seed != RANDOM_SEED:
        values["seed"] = fields.seed if fields.seed >= 0 else fields.seed % (MAX_SEED + 1)
    if fields.stop is not None:
        values["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if fields.logit_bias is not None:
        values["logit_bias"] = _logit_bias(fields.logit_bias)
    if fields.kv_compression is not None:
        values["kv_compression"] = msgspec.structs.asdict(fields.kv_compression)
    given = {name: value for name, value in settings.items() if value is not None}
    values |= given | {"max_tokens": max_tokens}
    return SamplingParams(**values, structured_outputs=structured)


def max_tokens_of(fields: OpenAIGeneration) -> int | None:
    """The output limit by any of its names; ApiError if they differ."""
    names = ("max_tokens", "max_completion_tokens", "n_predict")
    given = {
        name: value
        for name in names
        if (value := getattr(fields, name)) not in (None, UNLIMITED_TOKENS)
    }
    if len(set(given.values())) > 1:
        raise bad_request(f"{' and '.join(given)} differ.", next(iter(given)))
    return next(iter(given.values()), None)


def check_stream_options(fields: OpenAIGeneration) -> None:
    """ApiError for options of a stream that is not asked for, as at OpenAI and vLLM."""
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options needs stream.", "stream_options")


def limit_name(fields: OpenAIGeneration) -> str:
    """By which of its names the output limit came."""
    return "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"


def deadline_s(server: Server, fields: Generation) -> float | None:
    """``deadline_ms`` from now, on the ``time.monotonic`` clock; ApiError where none is kept."""
    if fields.deadline_ms is None:
        return None
    if server.engine.config.scheduling_policy != "edf":
        raise bad_request("deadline_ms needs a server with --scheduling-policy edf.", "deadline_ms")
    return time.monotonic() + fields.deadline_ms / 1e3


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if any(not (key.isascii() and key.isdigit() and len(key) < 11) for key in given):
        raise bad_request("The keys of logit_bias must be token ids.", "logit_bias")
    return {int(key): bias for key, bias in given.items()}
