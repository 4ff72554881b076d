"""`LLM`: the engine in the caller's own process."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ridgeline.core.config import EngineConfig, ResolvedConfig, with_overrides
from ridgeline.core.errors import (
    ChatTemplateError,
    InvalidRequestError,
    NotFiniteError,
    NoTokenError,
)
from ridgeline.core.request import FinishReason, Request, RequestOutput
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.spec import ModelSpec
from ridgeline.core.speculation_figures import SpeculationFigures
from ridgeline.engine.beam_search import BeamParams, BeamSearch, as_completions, beam_search
from ridgeline.engine.engine import Engine
from ridgeline.engine.loading import Progress
from ridgeline.engine.pooled_inputs import (
    PooledInput,
    Ranked,
    as_pairs,
    embedding_inputs,
    embedding_width,
    ranked,
    scoring_inputs,
    shortened,
)
from ridgeline.engine.prompts import Prompt, as_prompts, check_length, encode_prompt
from ridgeline.engine.request_state import RequestState
from ridgeline.engine.stream import CompletionStream
from ridgeline.kvcache import MissReport
from ridgeline.roofline.live import RooflineReport
from ridgeline.text import Tokenizer

Message = Mapping[str, Any]

# Decode steps that are replayed in one go while the caller waits for whole outputs, not for tokens:
# long beside the Python between steps, short enough for Ctrl-C.
_REPLAY_S = 0.05


class LLM:
    """A model that generates text, in this process.

    Args:
        model: a folder, a hub name, or ``None`` for the embedded model.
        progress: called with (bytes done, bytes in all, label) while weights load.
        settings: fields of `EngineConfig`; an unknown one is an error.

    Not thread-safe. Close it, or use it as a context manager, to free its memory.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        self._engine = Engine(
            with_overrides(EngineConfig(), model=model, **settings), progress=progress
        )
        self._loop = self._engine.loop
        info = self._engine.info
        self.name = info.name
        self.spec: ModelSpec = info.spec
        self.config: ResolvedConfig = info.config
        self.tokenizer: Tokenizer | None = info.tokenizer
        self.eos_token_ids = info.eos_token_ids
        self.adapters = info.adapters
        self.summary = info.summary
        self.sampling_defaults = info.sampling_defaults
        self.chat_template = info.chat_template
        self._streams: WeakValueDictionary[int, CompletionStream] = WeakValueDictionary()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts: strings or lists of token ids, one or several.

        ``params`` is one for all prompts or one for each (without it the model's own
        ``sampling_defaults`` hold), and so is ``adapter``, the name of one
        of the engine's LoRA adapters. Outputs are in the order of the prompts. Only requests of
        the same ``cache_salt`` reuse each other's prefixes.

        Raises:
            InvalidRequestError: a prompt or setting is out of bounds; nothing was computed.
            ContextLengthError: a prompt does not fit the context.
            NoTokenError: an output ended without a token, as of weights that are not finite; it has
                the outputs of all prompts.
        """
        batch = as_prompts(prompts)
        if adapter is None or isinstance(adapter, str):
            adapter = [adapter] * len(batch)
        states = self._add_all(batch, params, adapter, cache_salt)
        self._finish(states)
        outputs = [state.output() for state in states]
        if any(
            sample.finish_reason is FinishReason.ERROR
            for output in outputs
            for sample in output.outputs
        ):
            raise NoTokenError(outputs)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> CompletionStream:
        """Complete one prompt, chunk by chunk; several streams may be open at once."""
        (state,) = self._add_all([prompt], params, [adapter], cache_salt)
        request_id = state.request.request_id
        stream = CompletionStream(
            state,
            self._one_step,
            abort=partial(self._loop.abort, request_id),
            abort_later=partial(self._loop.abort_later, request_id),
        )
        self._streams[request_id] = stream
        return stream

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; see `render_chat` for the options."""
        if not isinstance(messages, list | tuple):
            raise InvalidRequestError("The messages must be a list, or a list of such lists.")
        batch = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate(
            [self.encode_chat(each, **template_options) for each in batch],
            params,
        )

    def encode_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation as the chat template renders it.

        Raises:
            ChatTemplateError: the model has no template, or it refuses the conversation.
            ContextLengthError: it is at once seen to be longer than the context.
        """
        text = self.render_chat(messages, **template_options)
        assert self.tokenizer is not None
        check_length(text, self.tokenizer, self.config.max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> str:
        """The chat template's text: options are tools, documents, continue_final_message, …

        Raises:
            ChatTemplateError: the model has no template, or it refuses the conversation.
        """
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.name} has no chat template; use generate instead.")
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **template_options
        )

    def logits(
        self, token_ids: Sequence[int], *, adapter: str | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits after each token, float32 ``[tokens, vocabulary]``, in one pass or more."""
        request = self._engine.requests.build(
            self._encode(token_ids),
            SamplingParams(max_tokens=1),
            adapter=adapter,
            wants_logits=True,
        )
        state = self._loop.add(request)
        self._finish([state])
        return state.prompt_logits()

    def pin_prefix(
        self, prompt: Prompt, *, adapter: str | None = None, cache_salt: str = ""
    ) -> int:
        """Compute a prefix, and keep the KV of its whole blocks until `unpin_prefix`.

        Returns a number for that. Only requests of the same adapter and ``cache_salt`` gain by it.

        Raises:
            InvalidRequestError: there is no prefix cache.
            OutOfMemoryError: what is left of the KV pool would not hold a sequence of full length.
        """
        request = self._prefix_request(prompt, adapter=adapter, cache_salt=cache_salt)
        assert request.cache_key is not None
        self._finish([self._loop.add(request)])
        scheduler = self._engine.scheduler
        return scheduler.pin_prefix(request.cache_key, request.prompt_token_ids)[0]

    def unpin_prefix(self, number: int) -> None:
        """Let go of a pinned prefix; once for each number that `pin_prefix` gave.

        Raises:
            InvalidRequestError: no prefix of that number is pinned.
        """
        self._engine.scheduler.unpin(number)

    def explain_miss(
        self, prompt: Prompt, *, adapter: str | None = None, cache_salt: str = ""
    ) -> MissReport:
        """How far a prompt is cached, and the first token that differs from what is."""
        request = self._prefix_request(prompt, adapter=adapter, cache_salt=cache_salt)
        assert request.cache_key is not None
        scheduler = self._engine.scheduler
        return scheduler.explain_miss(request.cache_key, request.prompt_token_ids)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: int | None = None,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> npt.NDArray[np.float32]:
        """Embeddings of prompts, float32 ``[prompts, width]``.

        The checkpoint's files say how hidden states become one vector, whether its length is 1 and
        which of its prompts go before a text (``prompt_name`` chooses another one; "" none).
        Without such files it is of length 1: the mean hidden state of an encoder, or of a decoder
        that of the last token after the final norm, which has seen the whole prompt.

        ``dimensions`` keeps the first ones, of length 1 again. ``truncate`` cuts texts to so many
        tokens, −1 to what the context holds; without it one that is too long is an error.

        Raises:
            UnsupportedModelError: the model is a reranker, or pools in a way that is not supported.
        """
        batch = as_prompts(prompts)
        inputs = embedding_inputs(
            self._engine.info,
            batch,
            prompt_name=prompt_name,
            truncate=truncate,
            dimensions=dimensions,
        )
        if not inputs:
            return np.empty((0, dimensions or embedding_width(self._engine.info)), np.float32)
        found = self._pool(batch, inputs, adapter=adapter, cache_salt=cache_salt)
        return shortened(found, dimensions)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate: int | None = None,
    ) -> list[float]:
        """How relevant each document is to the query beside it, or to the only query.

        Of a reranker its score, by its own activation; of a model that makes embeddings their
        cosine. ``truncate`` as in `embed`, of a pair as a whole.

        Raises:
            InvalidRequestError: there are neither as many queries as documents, nor one.
            UnsupportedModelError: the model neither scores nor makes embeddings.
        """
        pairs = as_pairs(queries, documents)
        inputs = scoring_inputs(self._engine.info, pairs, truncate=truncate)
        texts = [each.text for each in inputs.texts]
        return [float(score) for score in inputs.scores(self._pool(texts, inputs.texts))]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: int | None = None,
    ) -> list[Ranked]:
        """Documents by their `score` for the query, the most relevant first; the best ``top_n``."""
        return ranked(self.score(query, documents, truncate=truncate) if documents else [], top_n)

    def _pool(
        self,
        batch: Sequence[Prompt],
        inputs: Sequence[PooledInput],
        *,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> npt.NDArray[np.float32]:
        """What the model makes of hidden states, float32 ``[inputs, width]``."""
        requests = [
            self._engine.requests.build(
                each.token_ids,
                SamplingParams(max_tokens=1),
                adapter=adapter,
                cache_salt=cache_salt,
                wants_pooled=True,
                second_start=each.second_start,
            )
            for each in inputs
        ]
        states = self._queue(list(batch), requests)
        self._finish(states)
        found = np.array([self._engine.head(state.pooled()) for state in states], dtype=np.float32)
        if not np.isfinite(found).all():
            raise NotFiniteError
        return found

    def speculation(self) -> SpeculationFigures | None:
        """What was drafted and accepted so far; ``None`` if this engine does not speculate."""
        return self._engine.speculation.figures()

    def roofline(self) -> RooflineReport:
        """What the steps so far reached of this machine's ceilings, by phase."""
        return self._engine.observer.report()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamParams | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """The most likely completions of each prompt that a beam search finds, best first."""
        batch, params = as_prompts(prompts), params or BeamParams()
        searches = [
            BeamSearch(
                tuple(self._encode(prompt)), params, self.eos_token_ids, self.config.max_model_len
            )
            for prompt in batch
        ]
        beam_search(partial(self.generate, adapter=adapter, cache_salt=cache_salt), searches)
        return [
            RequestOutput(
                request_id=number,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=search.prompt_ids,
                outputs=as_completions(search, self.tokenizer),
                finished=True,
            )
            for number, (prompt, search) in enumerate(zip(batch, searches, strict=True))
        ]

    def close(self) -> None:
        """Free weights and KV; every later call raises `EngineError`."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapters: Sequence[str | None],
        cache_salt: str,
    ) -> list[RequestState]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams(**self.sampling_defaults)] * len(prompts)
        if not isinstance(params, list | tuple) or not all(
            isinstance(each, SamplingParams) for each in params
        ):
            raise InvalidRequestError("params must be SamplingParams, one or a list.")
        if not isinstance(adapters, list | tuple):
            raise InvalidRequestError("adapter must be a name, one or a list.")
        if len(params) != len(prompts):
            raise InvalidRequestError(f"{len(params)} sampling params for {len(prompts)} prompts.")
        if len(adapters) != len(prompts):
            raise InvalidRequestError(f"{len(adapters)} adapters for {len(prompts)} prompts.")
        requests = [
            self._engine.requests.build(
                self._encode(prompt), each, adapter=adapter, cache_salt=cache_salt
            )
            for prompt, each, adapter in zip(prompts, params, adapters, strict=True)
        ]
        return self._queue(prompts, requests)

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(prompt, self.tokenizer, self.config.max_model_len)

    def _queue(self, prompts: Sequence[Prompt], requests: Sequence[Request]) -> list[RequestState]:
        """Add all of the requests, or none of them."""
        states: list[RequestState] = []
        try:
            for prompt, request in zip(prompts, requests, strict=True):
                text = prompt if isinstance(prompt, str) else None
                states.append(self._loop.add(request, text))
        except Exception:
            for state in states:
                self._loop.abort(state.request.request_id)
            raise
        return states

    def _prefix_request(self, prompt: Prompt, *, adapter: str | None, cache_salt: str) -> Request:
        if not self.config.enable_prefix_caching:
            raise InvalidRequestError("There is no prefix cache: enable_prefix_caching.")
        return self._engine.requests.build(
            self._encode(prompt),
            SamplingParams(max_tokens=1),
            adapter=adapter,
            cache_salt=cache_salt,
        )

    def _finish(self, states: Sequence[RequestState]) -> None:
        """Run steps until these requests are finished; they are aborted if that is interrupted."""
        scheduler = self._engine.scheduler
        try:
            with self._loop.interrupts.installed(), scheduler.lengthened_replays(_REPLAY_S):
                for state in states:
                    while not state.is_finished:
                        self._step()
        finally:
            for state in states:
                self._loop.abort(state.request.request_id)

    def _one_step(self) -> None:
        with self._loop.interrupts.installed():
            self._step()

    def _step(self) -> None:
        if wait_s := self._loop.wait_s:
            time.sleep(wait_s)
        for chunk in self._loop.step():
            stream = self._streams.get(chunk.request_id)
            if stream is not None:
                stream.put(chunk)
