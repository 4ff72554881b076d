"""`LLM`: the engine in the caller's own process."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import psutil

from ridgeline.core.config import EngineConfig, ResolvedConfig, resolve, with_overrides
from ridgeline.core.errors import ChatTemplateError, InvalidRequestError
from ridgeline.core.philox import derive_seed
from ridgeline.core.plan import ModelRole
from ridgeline.core.request import Request, RequestOutput
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.cache_keys import cache_key
from ridgeline.engine.loading import Progress, load_model
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.prompts import Prompt, as_prompts, check_token_ids, encode_prompt
from ridgeline.engine.request_state import RequestState
from ridgeline.engine.stream import CompletionStream
from ridgeline.executors import create_executor
from ridgeline.scheduler import Scheduler, SchedulerConfig
from ridgeline.text import Tokenizer

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]


class LLM:
    """A model that generates text, in this process.

    Args:
        model: a folder, a hub name, or ``None`` for the embedded model.
        progress: called with (bytes done, bytes in all, label) while weights load.
        settings: fields of `EngineConfig`; an unknown one is an error.

    Not thread-safe. Close it, or use it as a context manager, to free its memory.
    """

    def __init__(
        self, model: str | None = None, *, progress: Progress | None = None, **settings: Any
    ) -> None:
        config = with_overrides(EngineConfig(model=model), **settings)
        loaded = load_model(config, progress=progress)
        self.name = loaded.name
        self.spec: ModelSpec = loaded.model.spec
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.adapters = tuple(config.adapters)
        self.sampling_defaults = loaded.sampling_defaults
        self._chat_template = loaded.chat_template
        self._executor = create_executor(
            config.executor, {ModelRole.TARGET: loaded.model}, block_tokens=config.block_tokens
        )
        self.config: ResolvedConfig = resolve(
            config,
            spec=loaded.model.spec,
            executor=self._executor.name,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            block_bytes=self._executor.kv_layout().block_bytes,
            free_bytes=psutil.virtual_memory().available,
        )
        if config.max_model_len is None and self.config.max_model_len < self.spec.max_position:
            _log.warning(
                "The context is clipped from %d to %d tokens: the KV pool has %.1f GB.",
                self.spec.max_position,
                self.config.max_model_len,
                self.config.kv_cache_bytes / 1e9,
            )
        layout = self._executor.kv_layout()
        self._kv_digest = layout.digest
        self._executor.allocate_kv(self.config.num_blocks)
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                max_model_len=self.config.max_model_len,
                num_blocks=self.config.num_blocks,
                windows=tuple(group.window for group in layout.groups),
                block_tokens=self.config.block_tokens,
            )
        )
        self._loop = EngineLoop(self._executor, scheduler, self.tokenizer)
        self._request_ids = itertools.count()
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
        """
        batch = as_prompts(prompts)
        if adapter is None or isinstance(adapter, str):
            adapter = [adapter] * len(batch)
        states = self._add_all(batch, params, adapter, cache_salt)
        self._finish(states)
        return [state.output() for state in states]

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
        stream = CompletionStream(state, self._step, lambda: self._loop.abort(request_id))
        self._streams[request_id] = stream
        return stream

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; see `render_chat` for the options."""
        batch = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate(
            [self.encode_chat(each, **template_options) for each in batch],  # type: ignore[arg-type]
            params,
        )

    def encode_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation as the chat template renders it."""
        text = self.render_chat(messages, **template_options)
        assert self.tokenizer is not None
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
        if self._chat_template is None:
            raise ChatTemplateError(f"{self.name} has no chat template; use generate instead.")
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **template_options
        )

    def logits(
        self, token_ids: Sequence[int], *, adapter: str | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits after each token, float32 ``[tokens, vocabulary]``, in one pass or more."""
        request = self._request(
            token_ids, SamplingParams(max_tokens=1), adapter=adapter, wants_logits=True
        )
        state = self._loop.add(request)
        self._finish([state])
        return state.prompt_logits()

    def close(self) -> None:
        """Free weights and KV; every later call raises `EngineError`."""
        self._loop.close()
        self._executor.close()

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
        if not all(isinstance(each, SamplingParams) for each in params):
            raise InvalidRequestError("params must be SamplingParams, one or a list.")
        if len(params) != len(prompts):
            raise InvalidRequestError(f"{len(params)} sampling params for {len(prompts)} prompts.")
        if len(adapters) != len(prompts):
            raise InvalidRequestError(f"{len(adapters)} adapters for {len(prompts)} prompts.")
        requests = [
            self._request(
                encode_prompt(prompt, self.tokenizer), each, adapter=adapter, cache_salt=cache_salt
            )
            for prompt, each, adapter in zip(prompts, params, adapters, strict=True)
        ]
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

    def _request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None,
        cache_salt: str = "",
        wants_logits: bool = False,
    ) -> Request:
        check_token_ids(token_ids, params, vocab_size=self.spec.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("This model has no tokenizer, so it has no stop strings.")
        slot = self._adapter_slot(adapter)
        request_id = next(self._request_ids)
        eos = () if params.ignore_eos or not self.tokenizer else self.tokenizer.eos_token_ids
        # What reports on every position of the prompt has to compute every position.
        reports_prompt = wants_logits or params.prompt_logprobs is not None
        uses_cache = self.config.enable_prefix_caching and not reports_prompt
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            params=params,
            seed=derive_seed(self.config.seed, request_id) if params.seed is None else params.seed,
            eos_token_ids=tuple(sorted(eos)),
            adapter=slot,
            wants_logits=wants_logits,
            cache_key=self._cache_key(len(token_ids), slot, cache_salt) if uses_cache else None,
        )

    def _adapter_slot(self, name: str | None) -> int:
        if name is None:
            return 0
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise InvalidRequestError(f"There is no adapter {name!r}; loaded are: {known}.")
        return self.adapters.index(name) + 1

    def _cache_key(self, num_prompt_tokens: int, adapter: int, salt: str) -> bytes:
        return cache_key(
            layout_digest=self._kv_digest,
            spec=self.spec,
            num_prompt_tokens=num_prompt_tokens,
            adapter=adapter,
            salt=salt,
        )

    def _finish(self, states: Sequence[RequestState]) -> None:
        """Run steps until these requests are finished; they are aborted if that is interrupted."""
        try:
            while not all(state.is_finished for state in states):
                self._step()
        finally:
            for state in states:
                self._loop.abort(state.request.request_id)

    def _step(self) -> None:
        for chunk in self._loop.step():
            stream = self._streams.get(chunk.request_id)
            if stream is not None:
                stream.put(chunk)
