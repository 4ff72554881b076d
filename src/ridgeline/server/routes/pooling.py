"""What is made of hidden states: embeddings, scores of pairs, documents in their order."""

import asyncio
import base64
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import InvalidRequestError, NotFiniteError
from ridgeline.engine.pooled_inputs import (
    PooledInput,
    ScoringInputs,
    as_pairs,
    embedding_inputs,
    ranked,
    scoring_inputs,
    shortened,
)
from ridgeline.server.context import Call
from ridgeline.server.cost import cost_of
from ridgeline.server.errors import bad_request
from ridgeline.server.generation import priority_of, salt_of
from ridgeline.server.ids import new_id
from ridgeline.server.prompts import (
    RawPrompt,
    check_in_vocabulary,
    count_prompts,
    split_prompts,
)
from ridgeline.server.replies import Reply
from ridgeline.server.schemas.pooling import (
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingUsage,
    RankedDocument,
    RerankRequest,
    RerankResponse,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
)

T = TypeVar("T")
Vectors = npt.NDArray[np.float32]


async def embeddings(call: Call, request: EmbeddingRequest) -> Reply:
    """The embedding of each input, as the checkpoint's files say it is made."""
    server = call.server
    model = server.check_model(request.model, call.caller)
    info = server.engine.info
    with call.admit(num_outputs=count_prompts(request.input)):
        prompts = split_prompts(request.input, "input")

        def work() -> list[PooledInput]:
            found = embedding_inputs(
                info,
                prompts,
                prompt_name=request.prompt_name,
                truncate=request.truncate_prompt_tokens,
                dimensions=request.dimensions,
            )
            for each in found:
                if not each.token_ids:
                    raise bad_request("The input has no tokens.", "input")
                check_in_vocabulary(server, each.token_ids, "input")
            return found

        inputs = await server.in_thread(work, num_chars=_num_chars(prompts))
        vectors = shortened(await _pooled(call, inputs, model), request.dimensions)
    usage = _usage(call, sum(len(each.token_ids) for each in inputs))
    as_base64 = request.encoding_format == "base64"
    return Reply(
        body=EmbeddingResponse(
            data=[
                EmbeddingItem(
                    index=index, embedding=_base64(vector) if as_base64 else vector.tolist()
                )
                for index, vector in enumerate(vectors)
            ],
            model=model,
            usage=usage,
        )
    )


async def score(call: Call, request: ScoreRequest) -> Reply:
    """How relevant each second text is to the first beside it, or to the only one."""
    model = call.server.check_model(request.model, call.caller)
    firsts, seconds = request.text_1, request.text_2
    scores, usage = await _scored(
        call, model, firsts, seconds, request.truncate_prompt_tokens, "text_2"
    )
    return Reply(
        body=ScoreResponse(
            id=new_id("score-"),
            created=int(time.time()),
            model=model,
            data=[ScoreItem(index=index, score=value) for index, value in enumerate(scores)],
            usage=usage,
        )
    )


async def rerank(call: Call, request: RerankRequest) -> Reply:
    """Documents by their relevance to a query, the most relevant first."""
    model = call.server.check_model(request.model, call.caller)
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    scores, usage = await _scored(
        call, model, request.query, texts, request.truncate_prompt_tokens, "documents"
    )
    return Reply(
        body=RerankResponse(
            id=new_id("rerank-"),
            model=model,
            usage=usage,
            results=[
                RankedDocument(
                    index=each.index,
                    relevance_score=each.score,
                    document={"text": texts[each.index]} if request.return_documents else None,
                )
                for each in ranked(scores, request.top_n or None)
            ],
        )
    )


async def _scored(
    call: Call,
    model: str,
    firsts: str | list[str],
    seconds: str | list[str],
    truncate: int | None,
    param: str,
) -> tuple[list[float], PoolingUsage]:
    server = call.server
    with call.admit(num_outputs=1 if isinstance(seconds, str) else len(seconds)):
        try:
            pairs = as_pairs(firsts, seconds)
        except InvalidRequestError as error:
            raise bad_request(str(error), param) from error

        def work() -> ScoringInputs:
            return scoring_inputs(server.engine.info, pairs, truncate=truncate)

        num_chars = _num_chars([text for pair in pairs for text in pair])
        inputs = await server.in_thread(work, num_chars=num_chars)
        found = inputs.scores(await _pooled(call, inputs.texts, model))
    return [float(value) for value in found], _usage(call, inputs.num_tokens)


async def _pooled(call: Call, inputs: Sequence[PooledInput], model: str) -> Vectors:
    """What the model makes of each input, ``[inputs, width]``."""
    server = call.server
    call.charge_input(sum(len(each.token_ids) for each in inputs))
    found = await _together(
        server.engine.embed(
            tuple(each.token_ids),
            request_id=new_id("emb-"),
            adapter=server.adapter(model),
            cache_salt=salt_of(call.caller.tenant),
            tenant=call.caller.tenant,
            priority=priority_of(call),
            second_start=each.second_start,
        )
        for each in inputs
    )
    vectors = np.array([each.vector for each in found], dtype=np.float32)
    if not np.isfinite(vectors).all():
        raise NotFiniteError
    return vectors


def _usage(call: Call, num_tokens: int) -> PoolingUsage:
    """Counts and prices the tokens of a call."""
    call.prompt_tokens = num_tokens
    cost = cost_of(call)
    call.server.metrics.meter(call).close(None if cost is None else cost.total)
    return PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens, cost=cost)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; raises the first failure as it is, and cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except* Exception as failures:
        first = failures.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first


def _num_chars(prompts: Iterable[RawPrompt]) -> int:
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
