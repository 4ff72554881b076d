"""Texts whose embeddings or relevance are wanted, as the tokens that the model is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import InvalidRequestError, UnsupportedModelError
from ridgeline.engine.info import EngineInfo
from ridgeline.engine.prompts import Prompt, check_length, encode_prompt
from ridgeline.text import Tokenizer

Vectors = npt.NDArray[np.float32]

# Prompts of sentence-transformers' ``encode_query`` and ``encode_document``, by their usual names.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledInput:
    """Tokens of a text, or of two whose second begins at ``second_start``."""

    text: Prompt
    token_ids: Sequence[int]
    second_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringInputs:
    """What is to be computed for the scores of pairs; ``scores`` makes them of its results."""

    texts: list[PooledInput]
    scores: Callable[[Vectors], Vectors]

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document by its place among those that were given, and its relevance."""

    index: int
    score: float


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[Ranked]:
    """The most relevant first, equal ones in their own order; the best ``top_n``.

    Raises:
        InvalidRequestError: ``top_n`` is less than one.
    """
    if top_n is not None and (not _is_whole(top_n) or top_n < 1):
        raise InvalidRequestError("top_n is the number of documents that are wanted: 1 or more.")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [Ranked(index=index, score=scores[index]) for index in order[:top_n]]


def as_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Each query with its document, or the only query with all of them.

    Raises:
        InvalidRequestError: their numbers do not allow it, or something is no text.
    """
    firsts = [queries] if isinstance(queries, str) else list(queries)
    seconds = [documents] if isinstance(documents, str) else list(documents)
    if not all(isinstance(text, str) for text in (*firsts, *seconds)):
        raise InvalidRequestError("What is scored must be text.")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds) or not seconds:
        raise InvalidRequestError(
            f"There are {len(firsts)} queries and {len(seconds)} documents: give one query, or one "
            "for each document."
        )
    return list(zip(firsts, seconds, strict=True))


def embedding_width(info: EngineInfo) -> int:
    """How many numbers an embedding has, where ``dimensions`` does not shorten it."""
    layers = info.pooling.layers
    return layers[-1].width if layers else info.spec.hidden_size


def embedding_inputs(
    info: EngineInfo,
    prompts: Sequence[Prompt],
    *,
    prompt_name: str | None = None,
    truncate: int | None = None,
    dimensions: int | None = None,
) -> list[PooledInput]:
    """Tokens of texts, behind the prompt of that name or the checkpoint's default ("": none).

    ``truncate`` is the number of tokens to keep, −1 for those that the context holds;
    ``dimensions`` how many `shortened` will keep.

    Raises:
        InvalidRequestError: there is no such prompt, there are not so many dimensions, or see
            `encode_prompt`.
        UnsupportedModelError: the model makes scores of pairs.
        ContextLengthError: a text is too long, and is not to be cut.
    """
    spec = info.pooling
    if spec.num_labels is not None:
        raise UnsupportedModelError(
            "This model scores pairs of texts (rerank, score); it makes no embeddings."
        )
    width = embedding_width(info)
    if dimensions is not None and not (_is_whole(dimensions) and 1 <= dimensions <= width):
        raise InvalidRequestError(f"dimensions may be {width} at the most, and at the least 1.")
    name = spec.default_prompt if prompt_name is None else prompt_name
    if name and name not in spec.prompts:
        known = ", ".join(spec.prompts) or "none"
        raise InvalidRequestError(f"The model has no prompt {name!r}; it has: {known}.")
    before = spec.prompts[name] if name else ""
    return [_encoded(info, prompt, before, truncate) for prompt in prompts]


def scoring_inputs(
    info: EngineInfo, pairs: Sequence[tuple[str, str]], *, truncate: int | None = None
) -> ScoringInputs:
    """What a model is given to score pairs, and how its results become scores.

    Raises:
        UnsupportedModelError: the model neither scores nor makes embeddings.
        ContextLengthError: a pair is too long, and is not to be cut.
    """
    spec = info.pooling
    if spec.num_labels is None and not spec.is_declared:
        raise UnsupportedModelError(
            "This model generates text; it is neither a reranker nor made for embeddings."
        )
    if spec.num_labels is None:
        return _cosines(info, pairs, truncate)
    if spec.num_labels != 1:
        raise UnsupportedModelError(
            f"This model tells {spec.num_labels} classes apart; relevance is a single score."
        )
    limit = _limit(info, truncate)
    texts = [_encoded_pair(info, first, second, limit) for first, second in pairs]
    return ScoringInputs(texts=texts, scores=lambda found: found[:, 0])


def shortened(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first numbers of each, of length 1 again."""
    if dimensions is None:
        return vectors
    part = vectors[:, :dimensions]
    lengths = np.maximum(np.linalg.norm(part, axis=1, keepdims=True), _TINY)
    return np.array(part / lengths, dtype=np.float32)


def _cosines(
    info: EngineInfo, pairs: Sequence[tuple[str, str]], truncate: int | None
) -> ScoringInputs:
    """Embeddings of all texts, each once; the cosines of those that belong together."""
    prompts = info.pooling.prompts
    query = next((name for name in _QUERY if name in prompts), None)
    document = next((name for name in _DOCUMENT if name in prompts), None)
    firsts = list(dict.fromkeys(first for first, _ in pairs))
    seconds = list(dict.fromkeys(second for _, second in pairs))
    texts = embedding_inputs(info, firsts, prompt_name=query, truncate=truncate)
    texts += embedding_inputs(info, seconds, prompt_name=document, truncate=truncate)
    row_of = {text: row for row, text in enumerate(firsts)}
    column_of = {text: len(firsts) + row for row, text in enumerate(seconds)}
    rows = [row_of[first] for first, _ in pairs]
    columns = [column_of[second] for _, second in pairs]

    def scores(found: Vectors) -> Vectors:
        unit = shortened(found, found.shape[1])
        return np.array((unit[rows] * unit[columns]).sum(axis=1), dtype=np.float32)

    return ScoringInputs(texts=texts, scores=scores)


def _encoded(info: EngineInfo, prompt: Prompt, before: str, truncate: int | None) -> PooledInput:
    limit, context = _limit(info, truncate), info.config.max_model_len
    text = before + prompt if isinstance(prompt, str) else prompt
    if isinstance(text, str) and info.pooling.lower_case:
        text = text.lower()
    if limit is None:
        return PooledInput(text=prompt, token_ids=encode_prompt(text, info.tokenizer, context))
    if isinstance(text, str):
        return PooledInput(text=prompt, token_ids=_tokenizer(info).encode_cut(text, limit))
    whole = encode_prompt(prompt, info.tokenizer, max(context, len(prompt)))
    return PooledInput(text=prompt, token_ids=whole[:limit])


def _encoded_pair(info: EngineInfo, first: str, second: str, limit: int | None) -> PooledInput:
    tokenizer = _tokenizer(info)
    if info.pooling.pairs_by_template:
        return _rendered_pair(info, first, second, limit)
    if limit is None:
        check_length(first + second, tokenizer, info.config.max_model_len)
    token_ids, second_start = tokenizer.encode_pair(first, second, limit)
    return PooledInput(text=first, token_ids=token_ids, second_start=second_start)


def _rendered_pair(info: EngineInfo, first: str, second: str, limit: int | None) -> PooledInput:
    """A pair as the messages of a reranker that is a language model."""
    if info.chat_template is None:
        raise UnsupportedModelError("This model scores by a chat template, and has none.")
    if limit is not None:
        raise InvalidRequestError("Pairs that a chat template renders are not truncated.")
    messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
    text = info.chat_template.render(messages, add_generation_prompt=True)
    check_length(text, info.tokenizer, info.config.max_model_len)
    return PooledInput(text=first, token_ids=_tokenizer(info).encode(text, False))


def _limit(info: EngineInfo, truncate: int | None) -> int | None:
    """How many tokens to keep; ``None``: all."""
    if truncate is None:
        return None
    if not _is_whole(truncate) or truncate == 0 or truncate < -1:
        raise InvalidRequestError("A text is cut to 1 token or more, or by −1 to the context.")
    context = info.config.max_model_len
    return context if truncate == -1 else min(truncate, context)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokenizer(info: EngineInfo) -> Tokenizer:
    if info.tokenizer is None:
        raise InvalidRequestError("This model has no tokenizer; give the prompt as token ids.")
    return info.tokenizer
