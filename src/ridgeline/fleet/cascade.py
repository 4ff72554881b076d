"""A small model answers first; where it was not sure, the large one does.

What the small one writes is held back until it has ended, and is judged by its margin: the mean,
over its tokens, of how far the log-probability of the likeliest is above that of the second. At or
above the threshold it is the client's; else it goes to the large model with the request, as a
draft. `fleet.cascade_calibration` finds the threshold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any

import msgspec
from prometheus_client import Counter

from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.forwarding import EVENTS, Client, Forwarding, answer_headers
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.router import PREFIX, Router
from ridgeline.fleet.upstream import UNREADABLE, AnswerHead
from ridgeline.server.body import decode_body
from ridgeline.server.errors import ApiError
from ridgeline.server.replies import DONE, encode

_BODY = msgspec.json.Decoder(dict[str, Any])
_CHAT = "/v1/chat/completions"
_ANSWERED_BY = b"x-ridgeline-cascade"
_DATA = b"data: {"
_MOST_MARGIN = 20.0  # where there is no second
# With these an answer is more than a text, or its tokens are not all of it.
_OF_THE_LARGE = (
    "logprobs", "top_logprobs", "tools", "functions", "echo", "suffix", "use_beam_search",
    "prompt_logprobs", "return_token_ids", "cached_content", "extra_body", "prediction",
)  # fmt: skip


def asked_of_small(
    path: str, body: Mapping[str, Any], model: str | None = None
) -> dict[str, Any] | None:
    """The request as the small model gets it, by its name if that is known; ``None`` where the
    large one answers at once: to several outputs or prompts, tools, log-probabilities and what is
    kept."""
    prompt = body.get("prompt")
    is_several = isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)
    if is_several or any(_is_asked(body.get(name)) for name in _OF_THE_LARGE):
        return None
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return None
    more = {"logprobs": True, "top_logprobs": 2} if path == _CHAT else {"logprobs": 2}
    return {**body, **more, "model": model}


def _is_asked(value: object) -> bool:
    """``logprobs: 0`` asks for those of the tokens themselves."""
    return bool(value) or (value == 0 and not isinstance(value, bool))


def margins(choice: Mapping[str, Any]) -> Iterator[float]:
    """Of each token, how far the likeliest is above the second."""
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content") or ()
    tops = [[one["logprob"] for one in each["top_logprobs"]] for each in content]
    tops += [list(each.values()) for each in logprobs.get("top_logprobs") or () if each]
    for top in tops:
        first, second, *_ = (*sorted(top, reverse=True), -inf, -inf)
        yield min(first - second, _MOST_MARGIN)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Those of a stream, or the one of a whole answer.

    Raises:
        msgspec.DecodeError: they cannot be read.
    """
    lines = [data]
    if not data.startswith(b"{"):
        lines = [line[len(_DATA) - 1 :] for line in data.split(b"\n") if line.startswith(_DATA)]
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


def _choices(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    return (choice for each in events for choice in each.get("choices") or ())


def score_of(events: Sequence[Mapping[str, Any]]) -> float:
    """The margin of an answer; below every threshold where it has none."""
    found = [one for choice in _choices(events) for one in margins(choice)]
    return fmean(found) if found else -inf


def text_of(events: Sequence[Mapping[str, Any]]) -> str:
    """What the answer says."""
    parts = []
    for choice in _choices(events):
        said = choice.get("message") or choice.get("delta") or {}
        parts.append(choice.get("text") or said.get("content") or "")
    return "".join(parts)


class HeldClient(Client):
    """Holds an answer back until it is whole; `pass_on` gives it to whoever asked."""

    def __init__(self) -> None:
        self.has_begun = False
        self._head: tuple[AnswerHead, RoutedEngine] | None = None
        self._whole: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._parts: list[bytes] = []
        self.is_whole = False

    async def begin(self, head: AnswerHead, engine: RoutedEngine) -> None:
        self.has_begun = True
        if head.fields.get(b"content-type", b"").startswith(EVENTS):
            self._head = (head, engine)
        else:  # too long to have come as one
            self._whole = (head.status, answer_headers(head, engine))

    def write(self, data: bytes) -> bool:
        self._parts.append(data)
        return True

    async def drain(self) -> None:
        """It is never full: answers have at most as many tokens as a context."""

    def break_off(self) -> None:
        self.is_whole = False

    async def end(self) -> None:
        self.is_whole = self._whole is None or self._whole[0] == 200

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.has_begun, self._whole = True, (status, headers)
        self._parts, self.is_whole = [body], status == 200

    def events(self) -> list[dict[str, Any]]:
        """Of an answer that is whole; none of another."""
        try:
            found = events_of(b"".join(self._parts)) if self.is_whole else []
        except UNREADABLE:
            return []
        return [] if any("error" in each for each in found) else found

    async def pass_on(self, client: Client, events: Sequence[dict[str, Any]]) -> None:
        """Send it, without the log-probabilities that nobody asked for."""
        for choice in _choices(events):
            choice["logprobs"] = None
        if self._whole is not None:
            await client.whole(*self._whole, encode(events[0]))
            return
        assert self._head is not None
        await client.begin(*self._head)
        client.write(b"".join(b"data: " + encode(each) + b"\n\n" for each in events) + DONE)
        await client.end()


class Cascade:
    """The small model's engines, behind a router of their own, and what became of requests."""

    def __init__(self, config: RouterConfig, router: Router) -> None:
        assert config.cascade_threshold is not None
        self._large = router
        self._threshold = config.cascade_threshold
        self.router = Router(
            replace(
                config, engine=config.cascade, cascade=(), cascade_threshold=None,
                cascade_timeout_s=60.0, slo=None,
                answer_timeout_s=min(config.cascade_timeout_s, config.answer_timeout_s),
                slo_share=0.95, min_replicas=1, max_replicas=None, start_s=60.0,
                disaggregate="off", request_log=None, request_log_text=False,
            )
        )  # fmt: skip
        self._answered = Counter(
            PREFIX + "cascade", "Requests by whose answer it was: of the small model, of the large "
            "one after the small one's, or of the large one at once.", ["by"],
            registry=router.registry,
        )  # fmt: skip
        self._margins = Counter(
            PREFIX + "cascade_margin_sum", "Of all answers of the small model.",
            registry=router.registry,
        )  # fmt: skip

    def small_request(self, request: RoutedRequest) -> RoutedRequest | None:
        """What the small model is asked; ``None`` if it is not."""
        models, larges = (
            next((each.state.models for each in router.engines if each.is_up), ())
            for router in (self.router, self._large)
        )
        asked = None
        is_up = any(each.is_up for each in self.router.engines)
        if request.is_continued and is_up and not request.is_for_first:
            try:
                body = decode_body(_BODY, request.body)
                if body.get("model") in (None, *larges[:1]):
                    asked = asked_of_small(request.path, body, *models[:1])
            except ApiError:  # which the engine will say better
                asked = None
        if asked is None:
            self._answered.labels("large at once").inc()
            return None
        return self._with_body(request, asked)

    def _with_body(self, request: RoutedRequest, body: dict[str, Any]) -> RoutedRequest:
        return RoutedRequest(
            method=request.method, path=request.path, target=request.target,
            headers=request.headers, body=encode(body), seed=request.seed,
        )  # fmt: skip

    def forwarding(self, request: RoutedRequest) -> tuple[Forwarding, HeldClient]:
        """The small model's answer, held back."""
        held = HeldClient()
        return Forwarding(self.router, request, held), held

    async def settle(
        self, held: HeldClient, request: RoutedRequest, client: Client
    ) -> RoutedRequest | None:
        """Pass an answer on, or say what is asked of the large model instead."""
        events = held.events()
        score = score_of(events)
        if events and score > -inf:
            self._margins.inc(max(0.0, score))
        if score >= self._threshold:
            client.added = [(_ANSWERED_BY, b"small")]
            self._answered.labels("small").inc()
            await held.pass_on(client, events)
            return None
        client.added = [(_ANSWERED_BY, b"large")]
        self._answered.labels("large").inc()
        text = text_of(events)
        if not text:
            return request
        body = msgspec.json.decode(request.body, type=dict[str, Any])
        body["prediction"] = {"type": "content", "content": text}
        return self._with_body(request, body)
