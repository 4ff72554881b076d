"""From a caller's wish to a checked `Request`."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.cache_groups import shares_kv
from ridgeline.core.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from ridgeline.core.kv_compression import KVCompression
from ridgeline.core.kv_reuse import ReusedRange, reused_ranges
from ridgeline.core.philox import derive_seed
from ridgeline.core.request import Request
from ridgeline.core.rounding import ceil_div
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.spec import AttentionSpec
from ridgeline.engine.cache_keys import cache_key
from ridgeline.engine.info import EngineInfo
from ridgeline.engine.prompts import check_token_ids
from ridgeline.engine.segments import find_segments
from ridgeline.executors.registry import executor_traits


class RequestFactory:
    """Numbers requests, checks them against the model, and fills in what follows from it.

    It needs no weights, so a server refuses a bad request without a word to the engine process.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._numbers = itertools.count()
        self._eos = tuple(sorted(info.eos_token_ids))

    def renew(self, info: EngineInfo) -> None:
        """Go on with an engine that was started again: its KV may be that of other weights."""
        self._info = info

    def renewed(self, request: Request, *, cache_salt: str) -> Request:
        """A request from before `renew`, with the cache key that it would get now."""
        if request.cache_key is None:
            return request
        key = self._cache_key(len(request.prompt_token_ids), request.adapter, cache_salt)
        return replace(request, cache_key=key)

    def build(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        arrival_s: float | None = None,
        wants_logits: bool = False,
        wants_pooled: bool = False,
        second_start: int | None = None,
        seed: int | None = None,
        output_token_ids: Sequence[int] = (),
        first_sample: int = 0,
        expected_token_ids: Sequence[int] = (),
    ) -> Request:
        """A request with the next number.

        ``wants_pooled``: instead of text, what the model makes of hidden states. ``seed``,
        ``output_token_ids``, ``first_sample`` and ``expected_token_ids``: see `GenerateRequest`.

        Raises:
            InvalidRequestError: a token id or the adapter does not exist, seed cannot hold, or the
                output that is to go on has ended.
            ContextLengthError: the prompt leaves no room in the context.
            UnsupportedModelError: the model generates no text, or pools in another way.
        """
        info = self._info
        vocab_size = info.spec.vocab_size
        check_token_ids(
            token_ids, params, output_token_ids, expected_token_ids, vocab_size=vocab_size
        )
        check_task(info, wants_pooled=wants_pooled)
        _check_params(info, params)
        room = 0 if wants_logits or wants_pooled else 1
        length = len(token_ids) + len(output_token_ids)
        if length + room > info.config.max_model_len:
            raise ContextLengthError(
                f"The prompt has {length} tokens and the context holds "
                f"{info.config.max_model_len}, output included."
            )
        eos = () if params.ignore_eos else self._eos
        if output_token_ids or first_sample:
            _check_continued(params, output_token_ids, (*eos, *params.stop_token_ids))
        slot = self._adapter_slot(adapter)
        number = next(self._numbers)
        # What reports on every position of the prompt has to compute every position.
        reports_prompt = wants_logits or params.prompt_logprobs is not None
        # What a token saw is part of what its KV is.
        is_whole = params.kv_compression is None and not reports_prompt
        uses_cache = info.config.enable_prefix_caching and is_whole
        key = self._cache_key(len(token_ids), slot, cache_salt) if uses_cache else None
        reused: tuple[ReusedRange, ...] = ()
        if params.segments and params.segment_reuse != "all":
            reused = self._reused(
                token_ids, params, length + room, reports=room == 0 or not uses_cache
            )
        if seed is None:
            seed = derive_seed(info.config.seed, number)
        return Request(
            request_id=number,
            prompt_token_ids=tuple(token_ids),
            params=replace(params, segments=(), segment_reuse="all") if params.segments else params,
            seed=seed if params.seed is None else params.seed,
            output_token_ids=tuple(output_token_ids),
            first_sample=first_sample,
            expected_token_ids=tuple(expected_token_ids),
            eos_token_ids=eos,
            adapter=slot,
            wants_logits=wants_logits,
            pooling=info.pooling.pooling if wants_pooled else None,
            second_start=second_start if (info.spec.token_types or 1) > 1 else None,
            cache_key=key,
            draft_namespace=f"{slot}/{cache_salt}",
            reused=reused,
            tenant=tenant,
            priority=priority,
            deadline_s=deadline_s,
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
        )

    def _reused(
        self, token_ids: Sequence[int], params: SamplingParams, length: int, *, reports: bool
    ) -> tuple[ReusedRange, ...]:
        """What a request takes of the documents that it marks; ``length`` is that of its context at
        the start, and ``reports`` whether more than output is wanted."""
        config = self._info.config
        if not config.enable_segment_reuse:
            raise InvalidRequestError(
                "segment_reuse needs an engine with enable_segment_reuse, which checks the model "
                'for it as it is loaded; or leave it at "all".'
            )
        if params.kv_compression is not None or reports:
            what = "kv_compression" if params.kv_compression else "prompt_logprobs, nor logits"
            raise InvalidRequestError(f"segment_reuse does not work with {what}.")
        reused = reused_ranges(
            find_segments(token_ids, params.segments, self._info.tokenizer),
            params.segment_reuse,
            num_prompt_tokens=len(token_ids),
            block_tokens=config.block_tokens,
        )
        most = length if params.max_tokens is None else len(token_ids) + params.max_tokens
        blocks = sum((each.stop - each.first) // config.block_tokens for each in reused)
        blocks += ceil_div(min(most, config.max_model_len), config.block_tokens)
        if reused and blocks > min(config.num_blocks):
            raise InvalidRequestError(
                f"The prompt and its documents take {blocks} KV blocks together, and the pool has "
                f'{min(config.num_blocks)}: mark fewer segments, or leave segment_reuse at "all".'
            )
        return reused

    def _adapter_slot(self, name: str | None) -> int:
        if name is None:
            return 0
        if name not in self._info.adapters:
            known = ", ".join(self._info.adapters) or "none"
            raise InvalidRequestError(f"There is no adapter {name!r}; loaded are: {known}.")
        return self._info.adapters.index(name) + 1

    def _cache_key(self, num_prompt_tokens: int, adapter: int, salt: str) -> bytes:
        return cache_key(
            layout_digest=self._info.kv_digest,
            spec=self._info.spec,
            num_prompt_tokens=num_prompt_tokens,
            adapter=adapter,
            salt=salt,
        )


def _check_params(info: EngineInfo, params: SamplingParams) -> None:
    """Raise `InvalidRequestError` if this engine cannot do what is asked of its outputs."""
    if params.stop and info.tokenizer is None:
        raise InvalidRequestError("This model has no tokenizer, so it has no stop strings.")
    is_drawn = params.seed is not None and not params.is_greedy
    if is_drawn and info.config.verification != "exact":
        raise InvalidRequestError(
            "seed cannot hold with verification='rejection': outputs depend on what was "
            "drafted. Leave it out, or use verification='exact'."
        )
    if params.kv_compression is not None:
        _check_compression(info, params.kv_compression)


def _check_continued(params: SamplingParams, output: Sequence[int], ends: Sequence[int]) -> None:
    if params.n != 1:
        raise InvalidRequestError("Outputs go on one by one: n must be 1.")
    is_full = params.max_tokens is not None and len(output) >= params.max_tokens
    if is_full or not set(ends).isdisjoint(output):
        raise InvalidRequestError("The output that is to go on has ended.")


def _check_compression(info: EngineInfo, compression: KVCompression) -> None:
    """Raise `InvalidRequestError` if this engine leaves nothing out of a request's KV."""
    config, num_choosing = info.config, compression.num_choosing
    reasons = {
        f"executor {config.executor}": not executor_traits(config.executor).compresses_kv,
        "reuse_kv off": not config.num_blocks,
        "context_parallel_size": config.context_ranks > 1,
    }
    if num_choosing:
        mixers = [layer.state or layer.attention for layer in info.spec.layers]
        plain = (isinstance(each, AttentionSpec) and each.window is None for each in mixers)
        reasons |= {
            "layers that are not full attention over K and V (method snapkv)": not all(plain),
            "layers that share KV (method snapkv)": shares_kv(info.spec),
            "several ranks (method snapkv)": config.num_ranks > 1,
        }
    for reason, is_so in reasons.items():
        if is_so:
            raise InvalidRequestError(f"kv_compression does not work with {reason}.")
    if num_choosing > config.max_num_batched_tokens:
        raise InvalidRequestError(
            f"kv_compression.window must be at most max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) with snapkv: its tokens are computed together."
        )


def check_task(info: EngineInfo, *, wants_pooled: bool) -> None:
    """Raise `UnsupportedModelError` if the model does not do what is asked of it."""
    if wants_pooled and info.pooling.refusal is not None:
        raise UnsupportedModelError(
            f"This model makes embeddings by {info.pooling.refusal}, which is not supported."
        )
    if not wants_pooled and not info.spec.has_head:
        what = "embeddings" if info.pooling.num_labels is None else "scores"
        raise UnsupportedModelError(f"This model makes {what}; it does not generate text.")
