"""How an endpoint is asked: with token ids, with text, or in a chat."""

from enum import StrEnum
from typing import Any


class Prompts(StrEnum):
    """What prompts are sent as.

    ``IDS`` asks for exactly as many tokens as are wanted, and for theirs and our extensions that
    tell tokens apart; ``TEXT`` and ``CHAT`` are plain OpenAI requests: answers may be shorter.
    """

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"


# One token each in common vocabularies, with the space before it.
_WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "government", "number",
    "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month",
    "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind",
    "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "car",
]  # fmt: skip


def text_of(token_ids: tuple[int, ...]) -> str:
    """About as many tokens of text, the same for the same ids."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)


def request_of(
    prompts: Prompts, model: str, token_ids: tuple[int, ...], max_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Path and body of a greedy, streamed completion."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompts is Prompts.CHAT:
        messages = [{"role": "user", "content": text_of(token_ids)}]
        return "/v1/chat/completions", body | {"messages": messages}
    if prompts is Prompts.TEXT:
        return "/v1/completions", body | {"prompt": text_of(token_ids)}
    return "/v1/completions", body | {
        "prompt": token_ids,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
