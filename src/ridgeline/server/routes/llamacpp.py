"""llama.cpp's own routes, as its editor plugins and front ends call them."""

import contextlib
import re
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

import ridgeline
from ridgeline.core.request import CompletionChunk, FinishReason, RequestTimings
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.server.answers import prompt_of
from ridgeline.server.context import Call
from ridgeline.server.conversation import ChatInput
from ridgeline.server.errors import bad_request
from ridgeline.server.fim import fim_prompt
from ridgeline.server.generation import Job, generate, retraction_of
from ridgeline.server.logprobs import token_text
from ridgeline.server.replies import EventStream, Reply, event
from ridgeline.server.response_cache import ReplayedChunk
from ridgeline.server.routes.chat import message_inputs
from ridgeline.server.routes.completions import prepare_completion
from ridgeline.server.schemas.completions import CompletionRequest
from ridgeline.server.schemas.generation import StructuredOutputsBody
from ridgeline.server.schemas.llamacpp import (
    ApplyTemplateRequest,
    InfillRequest,
    LlamaCppOptions,
    LlamaCppRequest,
)

_COPIED = (
    "model", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty",
    "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip
_LEAST_BIAS = -100.0
_LINE_START = re.compile(r"\n([ \t]*)(?=[^ \t])")


async def completion(call: Call, request: LlamaCppRequest) -> Reply | EventStream:
    """Continue a prompt, or each of several."""
    return await _answer(call, request, request.prompt)


async def infill(call: Call, request: InfillRequest) -> Reply | EventStream:
    """Write what stands between two texts."""
    extra = "".join(f"{each.filename}\n{each.text}\n\n" for each in request.input_extra or ())
    prefix = extra + request.input_prefix + request.prompt
    ids = await fim_prompt(call.server, prefix, request.input_suffix)
    return await _answer(call, request, ids)


async def props(call: Call) -> Reply:
    """What the server is, for those who ask before they call."""
    engine = call.server.engine
    tokenizer = engine.tokenizer
    special = {} if tokenizer is None else tokenizer.special_tokens
    context = engine.config.max_model_len
    return Reply(
        body={
            "default_generation_settings": {
                "n_ctx": context,
                "params": _settings(SamplingParams(**engine.sampling_defaults)),
            },
            "total_slots": engine.config.max_num_seqs,
            "model_alias": call.server.model_name,
            "model_path": engine.model_name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": call.server.template_source,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"ridgeline-{ridgeline.__version__}",
            "is_sleeping": False,
        }
    )


async def slots(call: Call) -> Reply:
    """Sequences that may run at once; none has a cache of its own here."""
    engine = call.server.engine
    running, context = engine.stats().num_running, engine.config.max_model_len
    return Reply(
        body=[
            {"id": number, "n_ctx": context, "is_processing": number < running}
            for number in range(engine.config.max_num_seqs)
        ]
    )


async def apply_template(call: Call, request: ApplyTemplateRequest) -> Reply:
    """The prompt of a conversation."""
    call.server.check_model(request.model, call.caller)
    turns = await call.read(message_inputs, request.messages)
    return Reply(body={"prompt": await prompt_of(call, ChatInput(messages=turns))})


async def _answer(
    call: Call, request: LlamaCppRequest | InfillRequest, prompt: str | list[Any]
) -> Reply | EventStream:
    context = call.server.engine.config.max_model_len
    max_tokens = context if request.n_predict < 0 else max(request.n_predict, 1)
    model, job = await prepare_completion(
        call,
        CompletionRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            logprobs=request.n_probs or None,
            logit_bias=_biases(call, request),
            structured_outputs=_format(request),
            **{name: getattr(request, name) for name in _COPIED},
        ),
        fits_context=True,
    )
    outputs = [_Output(call, request, model, job, index) for index in range(len(job.prompts))]
    if request.stream:
        return EventStream(events=_events(job, outputs))
    async for _ in _pieces(job, outputs):
        pass
    wholes = [output.whole() for output in outputs]
    return Reply(body=wholes[0] if len(wholes) == 1 else wholes)


async def _pieces(
    job: Job, outputs: Sequence["_Output"]
) -> AsyncGenerator[tuple["_Output", CompletionChunk], None]:
    """What the engine writes of each output, up to where the request cuts it."""
    async with contextlib.aclosing(generate(job)) as chunks:
        async for index, chunk in chunks:
            output = outputs[index]
            if output.is_over:
                continue
            piece = output.take(chunk)
            job.call.is_complete = all(each.is_over for each in outputs)
            yield output, piece
            if job.call.is_complete and any(each.is_cut for each in outputs):
                return


async def _events(job: Job, outputs: Sequence["_Output"]) -> AsyncGenerator[bytes, None]:
    """The pieces, and after the last of an output what is said of it as a whole."""
    async with contextlib.aclosing(_pieces(job, outputs)) as pieces:
        async for output, chunk in pieces:
            if chunk.text or chunk.token_ids:
                yield event(output.piece(chunk))
            if output.is_over:
                yield event(output.whole(in_stream=True))


def _biases(call: Call, request: LlamaCppOptions) -> dict[str, float] | None:
    """By token id; of a text each token has its bias."""
    given = request.logit_bias
    if not isinstance(given, list):
        return given

    def meant_by(each: int | str) -> list[int]:
        return [each] if isinstance(each, int) else call.server.tokenizer.encode(each, False)

    return {
        str(token): _LEAST_BIAS if bias is False else bias
        for each, bias in given
        for token in meant_by(each)
    }


def _format(request: LlamaCppOptions) -> StructuredOutputsBody | None:
    if request.grammar and request.json_schema is not None:
        raise bad_request("grammar and json_schema exclude each other.", "grammar")
    if request.json_schema is not None:
        return StructuredOutputsBody(json=request.json_schema)
    return StructuredOutputsBody(grammar=request.grammar) if request.grammar else None


def _settings(params: SamplingParams) -> dict[str, Any]:
    """How tokens are chosen, by llama.cpp's names."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "seed": params.seed,
    }


def _at(answer: dict[str, Any], path: str) -> list[Any]:
    """What stands at a path such as ``timings/prompt_n``; nothing if there is no such."""
    found: Any = answer
    for name in path.split("/"):
        if not isinstance(found, dict) or name not in found:
            return []
        found = found[name]
    return [found]


class _Output:
    """What continues one of the prompts; it ends by itself, or is cut where the request says so."""

    def __init__(
        self, call: Call, request: LlamaCppOptions, model: str, job: Job, index: int
    ) -> None:
        self._call, self._request, self._model, self._job = call, request, model, job
        self._index = index
        self._num_prompt_tokens, self._num_cached_tokens = len(job.prompts[index]), 0
        self._texts: list[str] = []
        self._line = ""  # that is not ended, with the line break before it
        self._tokens: list[int] = []
        self._probabilities: list[dict[str, Any]] = []
        self._first_s = 0.0
        self.is_over = self.is_cut = False
        self._last: CompletionChunk | None = None
        self._timings: RequestTimings | None = None

    def take(self, chunk: CompletionChunk) -> CompletionChunk:
        """Keep what is to be written of a chunk, and return that."""
        self._first_s = self._first_s or time.monotonic()
        self._last, self._timings = chunk, chunk.timings or self._timings
        self.is_over = chunk.finish_reason is not None
        if (report := chunk.prompt) is not None:
            is_replayed = isinstance(chunk, ReplayedChunk)
            cached = report.num_tokens if is_replayed else report.num_cached_tokens
            self._num_cached_tokens = cached
        if self._request.n_predict == 0:
            return msgspec.structs.replace(chunk, text="", token_ids=())
        text, is_enough = self._kept(chunk.text)
        self._texts.append(text)
        self._tokens += chunk.token_ids
        self._probabilities += self._likely(chunk)
        if is_enough and not self.is_over:
            self.is_over = self.is_cut = True
            self._timings = RequestTimings(
                queue_s=0.0,
                ttft_s=self._first_s - self._call.arrival_s,
                tpot_s=None,
                end_to_end_s=time.monotonic() - self._call.arrival_s,
            )
        return msgspec.structs.replace(chunk, text=text)

    def _kept(self, new: str) -> tuple[str, bool]:
        """What is written of a piece, and whether ``n_indent`` or ``t_max_predict_ms`` end it."""
        if self._request.n_indent:
            text, known = self._line + new, len(self._line)
            for match in _LINE_START.finditer(text):
                if len(match[1]) < self._request.n_indent:
                    return text[known : match.end()], True
            self._line = text[max(text.rfind("\n"), 0) :]
        limit_s = (self._request.t_max_predict_ms or 0) / 1e3
        return new, 0 < limit_s < time.monotonic() - self._first_s and "\n" in new

    def piece(self, chunk: CompletionChunk) -> dict[str, Any]:
        """What an event tells of a chunk."""
        found = {
            "index": self._index,
            "content": chunk.text,
            "tokens": list(chunk.token_ids),
            "stop": False,
        }
        if chunk.logprobs:
            found["completion_probabilities"] = self._likely(chunk)
        return found | self._counts()

    def whole(self, *, in_stream: bool = False) -> dict[str, Any]:
        """The answer with all that is said of it at its end, or what was asked for of it."""
        found = self._whole() | ({"content": "", "tokens": []} if in_stream else {})
        paths = self._request.response_fields
        return {path: part for path in paths for part in _at(found, path)} if paths else found

    def _whole(self) -> dict[str, Any]:
        last = self._last
        assert last is not None
        wanted = self._request.n_predict
        is_filtered = last.finish_reason is FinishReason.CONTENT_FILTER
        by_word = isinstance(last.stop_reason, str) and not is_filtered
        is_full = str(last.finish_reason) == "length"
        found: dict[str, Any] = {
            "index": self._index,
            "content": "".join(self._texts),
            "tokens": self._tokens if self._request.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "stop_type": "limit" if is_full or self.is_cut else "word" if by_word else "eos",
            "stopping_word": last.stop_reason if by_word else "",
            "truncated": is_full and not 0 <= wanted <= len(self._tokens),
            "tokens_cached": self._num_cached_tokens,
            "timings": self._shown_timings(),
            "generation_settings": {"n_predict": wanted, **_settings(self._job.params)},
        }
        if is_filtered:
            found |= {"stop_type": "content_filter", "retraction": retraction_of(last)}
        if self._probabilities:
            found["completion_probabilities"] = self._probabilities
        return found | self._counts()

    def _counts(self) -> dict[str, int]:
        return {
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": self._num_prompt_tokens,
        }

    def _likely(self, chunk: CompletionChunk) -> list[dict[str, Any]]:
        tokenizer = self._call.server.engine.tokenizer

        def shown(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "token": token_text(tokenizer, token), "logprob": logprob}

        return [
            shown(entry.token_id, entry.logprob)
            | {"top_logprobs": [shown(token, logprob) for token, logprob in entry.top]}
            for entry in chunk.logprobs
        ]

    def _shown_timings(self) -> dict[str, float]:
        timings = self._timings
        if timings is None or timings.ttft_s is None:
            return {}
        prompt_s, decode_s = timings.ttft_s - timings.queue_s, timings.end_to_end_s - timings.ttft_s
        found: dict[str, float] = {"cache_n": self._num_cached_tokens}
        for name, count, seconds in (
            ("prompt", self._num_prompt_tokens - self._num_cached_tokens, prompt_s),
            ("predicted", len(self._tokens), decode_s),
        ):
            found[f"{name}_n"] = count
            found[f"{name}_ms"] = seconds * 1e3
            found[f"{name}_per_token_ms"] = seconds * 1e3 / max(count, 1)
            found[f"{name}_per_second"] = count / seconds if seconds > 0 else 0.0
        return found
