"""Ollama's interface: ``/api/chat``, ``/api/generate`` and their like."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ridgeline.core.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_TOKENS
from ridgeline.server.schemas.chat import MAX_MESSAGES, MAX_TOOLS, Tool
from ridgeline.server.schemas.generation import Name, Penalty, Share, StopString
from ridgeline.server.schemas.pooling import MAX_INPUTS

Format = Literal["", "json"] | dict[str, Any]
Think = bool | Literal["low", "medium", "high"]
KeepAlive = str | float


class OllamaOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are chosen. ``num_predict``: −1 and −2 are up to the end of the context.

    Inert, since they are the server's own: ``num_ctx``, ``num_keep``, ``num_batch``, ``num_gpu``,
    ``main_gpu``, ``num_thread``, ``numa``, ``low_vram``, ``use_mmap``, ``use_mlock``,
    ``vocab_only``, ``f16_kv``, ``logits_all``, ``penalize_newline``; and ``repeat_last_n`` (all
    of the text counts).
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_p: Share | None = None
    seed: int | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    typical_p: Annotated[float, Meta(ge=1.0, le=1.0)] | None = None
    tfs_z: Annotated[float, Meta(ge=1.0, le=1.0)] | None = None
    mirostat: Literal[0] | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    penalize_newline: bool | None = None
    repeat_last_n: int | None = None


class OllamaFunction(Struct, kw_only=True):
    """``arguments`` is an object."""

    name: Name
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaCall(Struct, kw_only=True):
    """A call that the model made earlier."""

    function: OllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """``images`` are refused where there are any."""

    role: Annotated[str, Meta(min_length=1, max_length=128)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """``keep_alive``: how long one of several models stays; without input 0 lets it go at once."""

    model: Name
    stream: bool = True
    format: Format | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class OllamaChatRequest(_Asked, kw_only=True):
    """``truncate`` and ``shift`` are inert: what does not fit the context is refused."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def asks_nothing(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(_Asked, kw_only=True):
    """``raw``: ``prompt`` is not put into the chat template. ``suffix``: what comes after a gap."""

    prompt: str = ""
    suffix: str | None = None
    images: list[Any] | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool = False

    @property
    def asks_nothing(self) -> bool:
        return not (self.prompt or self.suffix)


class OllamaEmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``truncate``: cut inputs that are longer than the context, which is the default."""

    model: Name
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: bool = True
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The older one, of a single text."""

    model: Name
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaShowRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``name`` is the older word for ``model``; ``verbose`` is inert: nothing is left out."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    options: Any = None


class OllamaPullRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``insecure`` is inert: the hub is reached as ``HF_ENDPOINT`` says."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool = True


class OllamaDeleteRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which model."""

    model: str | None = None
    name: str | None = None
