"""llama.cpp's own interface: ``/completion``, ``/infill``, ``/apply-template``."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ridgeline.core.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_TOKENS
from ridgeline.server.schemas.chat import ChatMessage
from ridgeline.server.schemas.generation import Bias, Count, Name, Penalty, Share, StopString
from ridgeline.server.schemas.samplers import LlamaCppSamplers

# What is read for each output, or tokenized, while others wait: there is a limit of it.
_BiasedText = Annotated[str, Meta(max_length=256)]
_Biases = Annotated[list[tuple[int | _BiasedText, Bias | Literal[False]]], Meta(max_length=1024)]


class LlamaCppOptions(LlamaCppSamplers, kw_only=True):
    """``n_predict``: −1 is up to the end of the context; 0 only caches the prompt. ``grammar``:
    GBNF or Lark.

    ``logit_bias``: pairs of a token id, or a text whose tokens are meant, and a bias, of which
    ``false`` is the least. ``n_indent``: a line after the first that is indented by less ends the
    output before it. ``t_max_predict_ms``: so does the end of a line after that time.
    ``response_fields``: what the answer has, by paths such as ``timings/prompt_n``, which are also
    their names there. ``t_max_prompt_ms`` is inert.
    """

    model: Name | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Share | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | _Biases | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    return_tokens: bool = False
    n_indent: Count = 0
    t_max_predict_ms: float | None = None
    t_max_prompt_ms: float | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None


class LlamaCppRequest(LlamaCppOptions, kw_only=True):
    """``prompt``: a text, token ids, or several of either, of which each has an answer."""

    prompt: Annotated[str | list[Any], Meta(description="text, token ids, or a list of either")]


class ExtraFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of another file; ``time``, when an editor noted it, is inert."""

    text: str = ""
    filename: str = ""
    time: Any = None


class InfillRequest(LlamaCppOptions, kw_only=True):
    """What stands before and after the gap; ``prompt`` goes on with ``input_prefix``.

    ``input_extra``: other files, put before the prefix as the name on a line of its own, the text
    and an empty line.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[ExtraFile] | None = None


class ApplyTemplateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A conversation to render."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
