"""Whether an endpoint serves the model that it names, in the precision that it claims.

It answers prompts greedily and tells the log-probabilities of its likeliest tokens; a reference on
this machine computes the same positions, and so do coarser formats of it. KL(reference ‖ endpoint)
is over the tokens that were told and all others together: a lower bound of that over all tokens,
and the same bound for the endpoint and for each format, so that they can be compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.bench.serve.prompts import Prompts
from ridgeline.core.errors import NetworkError
from ridgeline.engine.llm import LLM
from ridgeline.evaluation import Document, log_softmax
from ridgeline.text import Tokenizer

TOP = 5  # of OpenAI's completions; the most that all endpoints tell
_LEAST_MASS = 1e-9  # below what rounded log-probabilities tell of the other tokens
_SAME_WITHIN, _ERRORS = 1.5, 3.0


class _Told(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list["_Told"] = []

    @property
    def text(self) -> str:
        if self.bytes is None:
            return self.token
        return bytes(self.bytes).decode("utf-8", "replace")


class _Logprobs(msgspec.Struct):
    content: list[_Told] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedText:
    """A prompt as text and as the reference's tokens; of a chat, the text is the user's."""

    text: str
    token_ids: Document


@dataclass(frozen=True, slots=True)
class Position:
    """A token of an answer, and log-probabilities by the text of the likeliest."""

    token: str
    told: Mapping[str, float]


async def ask(target: HttpTarget, question: AskedText, *, max_tokens: int) -> Sequence[Position]:
    """The endpoint's greedy answer to a question, in the form that ``target.prompts`` says.

    Raises:
        NetworkError: it does not answer so, or tells no log-probabilities.
    """
    body: dict[str, object] = {"max_tokens": max_tokens, "temperature": 0.0}
    if target.prompts is Prompts.CHAT:
        messages = [{"role": "user", "content": question.text}]
        body |= {"messages": messages, "logprobs": True, "top_logprobs": TOP}
        answer = await target.ask("/v1/chat/completions", body)
    else:
        prompt = question.token_ids if target.prompts is Prompts.IDS else question.text
        answer = await target.ask("/v1/completions", body | {"prompt": prompt, "logprobs": TOP})
    try:
        choices = msgspec.json.decode(answer, type=_Completion).choices
    except msgspec.DecodeError as error:
        raise NetworkError(f"The endpoint's answer is not a completion: {error}") from error
    told = choices[0].logprobs if choices else None
    if told is None:
        raise NetworkError("The endpoint tells no log-probabilities; they are what is compared.")
    if told.content is not None:
        return [
            Position(each.text, {other.text: other.logprob for other in (*each.top_logprobs, each)})
            for each in told.content
        ]
    tops = told.top_logprobs or [{}] * len(told.tokens)
    return [
        Position(token, (top or {}) | ({} if logprob is None else {token: logprob}))
        for token, logprob, top in zip(told.tokens, told.token_logprobs, tops, strict=False)
    ]


class TokensByText:
    """Token ids by their text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._ids: dict[str, list[int]] = {}
        for index in range(min(vocab_size, tokenizer.vocab_size)):
            text = tokenizer.token_bytes(index).decode("utf-8", "replace")
            self._ids.setdefault(text, []).append(index)

    def id_of(self, text: str) -> int | None:
        """The one token with this text; ``None`` if there is none or several."""
        found = self._ids.get(text, ())
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """An answer in the reference's tokens: each position's are those told that are known.

    ``document`` is prompt and answer but its last token, ``start`` the answer's place in it;
    ``told[i]`` are log-probabilities by token id after ``document[start - 1 + i]``.
    """

    document: Document
    start: int
    told: Sequence[Mapping[int, float]]


def trace(question: AskedText, answer: Sequence[Position], vocabulary: TokensByText) -> Trace:
    """The answer up to the first token whose text is none, or several, of the vocabulary."""
    tokens, told = [], []
    for position in answer:
        token = vocabulary.id_of(position.token)
        if token is None:
            break
        known = ((vocabulary.id_of(text), logprob) for text, logprob in position.told.items())
        tokens.append(token)
        told.append({index: logprob for index, logprob in known if index is not None})
    document = (*question.token_ids, *tokens[:-1])
    return Trace(document=document, start=len(question.token_ids), told=told)


Rows = Sequence[npt.NDArray[np.float64]]
"""Of each position, the log-probabilities of the tokens that the endpoint told there."""


def told_rows(traces: Sequence[Trace]) -> Rows:
    """What the endpoint said."""
    return [np.array(list(told.values())) for each in traces for told in each.told if told]


def computed_rows(llm: LLM, traces: Sequence[Trace]) -> Rows:
    """What a model here says of the same tokens."""
    rows = []
    for each in traces:
        logits = llm.logits(each.document)[each.start - 1 :]
        for said, told in zip(log_softmax(logits), each.told, strict=True):
            if told:
                rows.append(said[list(told)].astype(np.float64))
    return rows


def divergences(wanted: Rows, said: Rows) -> npt.NDArray[np.float64]:
    """KL(reference ‖ found) of each position in nats."""
    return np.array([_kl(*pair) for pair in zip(wanted, said, strict=True)])


def same_top(wanted: Rows, said: Rows) -> float:
    """The share of positions with the same most likely token of those told."""
    pairs = zip(wanted, said, strict=True)
    return float(np.mean([one.argmax() == other.argmax() for one, other in pairs]))


def _kl(wanted: npt.NDArray[np.float64], said: npt.NDArray[np.float64]) -> float:
    """Over some tokens, and the rest as one more; of log-probabilities."""
    rest = [max(1.0 - float(np.exp(each).sum()), _LEAST_MASS) for each in (wanted, said)]
    shared = float((np.exp(wanted) * (wanted - said)).sum())
    return max(0.0, shared + rest[0] * math.log(rest[0] / rest[1]))


def is_further(endpoint: npt.NDArray[np.float64], claimed: npt.NDArray[np.float64]) -> bool:
    """Whether an endpoint is further from the reference than a format, beyond chance.

    Half as far again on average, and by more than three standard errors of the paired difference.
    """
    difference = endpoint - claimed
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    is_more = endpoint.mean() > _SAME_WITHIN * claimed.mean()
    return bool(is_more and difference.mean() > _ERRORS * error)


def nearest(endpoint: float, formats: Mapping[str, float]) -> str:
    """Whose mean KL is nearest to the endpoint's, by their ratio."""
    floor = 1e-12
    return min(
        formats, key=lambda name: abs(math.log((endpoint + floor) / (formats[name] + floor)))
    )
