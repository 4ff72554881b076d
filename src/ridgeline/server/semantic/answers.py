"""Questions of conversations and answers that are compared, for a `SemanticCache`."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import RidgelineError
from ridgeline.core.request import CompletionChunk
from ridgeline.engine.client import EngineClient
from ridgeline.engine.pooled_inputs import embedding_inputs
from ridgeline.server.conversation import ChatInput, text_of
from ridgeline.server.ids import new_id
from ridgeline.server.response_cache import cache_key
from ridgeline.server.semantic.cache import Nearest, Scope, SemanticCache

_log = logging.getLogger(__name__)
_MAX_TASKS = 32  # comparisons at once; more are left out
Judge = Callable[["UserQuestion", str, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserQuestion:
    """The user's last turn as text, and a digest of all of the conversation beside it."""

    text: str
    context: bytes


def question_of(conversation: ChatInput) -> UserQuestion | None:
    """What a conversation asks, if its last turn is the user's and the answer is free."""
    last = conversation.messages[-1] if conversation.messages else {}
    text = text_of(last.get("content"))
    is_free = conversation.choice != "required" and not conversation.continue_final_message
    if last.get("role") != "user" or not text.strip() or not is_free:
        return None
    tools = [tool.as_template_input() for tool in conversation.offered_tools]
    context = cache_key(
        conversation.messages[:-1], last.get("name"), tools, conversation.documents,
        conversation.variables, conversation.add_generation_prompt, conversation.parallel_calls,
    )  # fmt: skip
    return UserQuestion(text=text, context=context)


def same_text(first: str, second: str) -> bool:
    """Whether two answers are one but for spaces and case."""
    return first.casefold().split() == second.casefold().split()


class SimilarAnswers:
    """A `SemanticCache` with what makes its vectors, and what compares its answers."""

    def __init__(self, cache: SemanticCache, encoder: EngineClient, judge: Judge | None) -> None:
        self.cache = cache
        self._encoder = encoder
        self._judge = judge
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether answers are being compared."""
        return bool(self._tasks)

    async def nearest(
        self, scope: Scope, question: UserQuestion, *, cache_salt: str, priority: int
    ) -> Nearest | None:
        """The entry nearest to a question; ``None`` if its text has no vector, being too long."""
        try:
            (text,) = embedding_inputs(
                self._encoder.info,
                [question.text],
                prompt_name=None,
                truncate=None,
                dimensions=None,
            )
            embedding = await self._encoder.embed(
                tuple(text.token_ids),
                request_id=new_id("emb-"),
                cache_salt=cache_salt,
                tenant=scope[0],
                priority=priority,
            )
        except RidgelineError:
            return None
        return self.cache.nearest(scope, embedding.vector)

    def learn(
        self, scope: Scope, question: UserQuestion, found: Nearest, answer: CompletionChunk
    ) -> None:
        """Compare a new answer with the nearest entry's, and keep what follows."""

        async def work() -> None:
            is_right = await self._is_right(question, found, answer.text)
            self.cache.learn(scope, found, answer, is_right=is_right)

        self._begin(work())

    def audit(
        self, question: UserQuestion, found: Nearest, answer: Coroutine[Any, Any, str | None]
    ) -> None:
        """Compare the answer that was given with the one that ``answer`` makes, if it makes one."""

        async def work() -> None:
            text = await answer
            if text is not None:
                self.cache.audited(found, is_right=await self._is_right(question, found, text))

        if len(self._tasks) < _MAX_TASKS:
            self._begin(work())
        else:
            answer.close()

    def close(self) -> None:
        """End what is being compared."""
        for task in self._tasks:
            task.cancel()

    async def _is_right(self, question: UserQuestion, found: Nearest, text: str) -> bool:
        if found.entry is None:
            return False
        known = found.entry.answer.text
        if same_text(known, text):
            return True
        return False if self._judge is None else await self._judge(question, known, text)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded_work() -> None:
            with contextlib.suppress(RidgelineError):  # the engine takes nothing now
                await work

        task = asyncio.create_task(guarded_work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
