"""Which requests are for a beam search, and what has no part in one."""

from collections.abc import Mapping, Sequence

from ridgeline.core.sampling_params import MAX_TOKENS
from ridgeline.engine.beam_search import MAX_BEAMS, BeamParams
from ridgeline.server.context import Server
from ridgeline.server.errors import bad_request
from ridgeline.server.schemas.generation import OpenAIGeneration

# What shapes or ends an output otherwise, and the values that leave it alone.
_NO_PART: Mapping[str, Sequence[object]] = {
    "temperature": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "stop": ([],),
    "stop_token_ids": ([],), "min_tokens": (0,), "include_stop_str_in_output": (False,),
    "prompt_logprobs": (), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "kv_compression": (), "segments": ([],),
    "segment_reuse": ("all",),
}  # fmt: skip


def beam_params(
    server: Server, fields: OpenAIGeneration, *, max_tokens: int | None, logprobs: int | None
) -> BeamParams | None:
    """The settings of the beam search that a request asks for; ``None`` if it asks for none.

    ``max_tokens``: of an output, ``None`` for as many as the context. ``logprobs``: alternatives of
    each token that are wanted, ``None`` for no log-probabilities.

    Raises:
        ApiError: something in the request has no part in a beam search.
    """
    if not fields.use_beam_search:
        if fields.length_penalty is not None:
            raise bad_request("length_penalty needs use_beam_search.", "length_penalty")
        return None
    if fields.stream:
        raise bad_request(
            "A beam search cannot be streamed: which beams are the best is known at its end.",
            "stream",
        )
    for name, neutral in _NO_PART.items():
        if (value := getattr(fields, name)) is not None and value not in neutral:
            raise refused_in_beams(name)
    if fields.response_format is not None and fields.response_format.type != "text":
        raise refused_in_beams("response_format")
    width = fields.n or 1
    most = min(MAX_BEAMS, server.engine.spec.vocab_size // 2)
    if width > most:
        raise bad_request(f"A beam search follows {most} beams at the most, which are n.", "n")
    return BeamParams(
        beam_width=width,
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
    )


def refused_in_beams(name: str) -> Exception:
    """The refusal of a field that shapes samples."""
    return bad_request(
        f"{name} has no part in a beam search, which follows the likeliest tokens.", name
    )
