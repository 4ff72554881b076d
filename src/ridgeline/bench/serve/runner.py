"""Putting a workload on a target, and recording what comes back."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from ridgeline.bench.serve.metrics import RequestTrace
from ridgeline.bench.serve.targets import THROTTLED, StatusError, Target
from ridgeline.bench.serve.workload import Dialogue, Turn
from ridgeline.core.errors import RidgelineError

Progress = Callable[[int], None]


async def run_open_loop(
    target: Target,
    conversations: Iterable[Dialogue],
    *,
    think_s: float = 0.0,
    may_be_short: bool = False,
    progress: Progress = lambda _: None,
) -> list[RequestTrace]:
    """Start each conversation when it is due, however many are still in progress.

    Answers that end early are failures, unless they ``may_be_short``.
    """
    recorder = _Recorder(target, think_s, progress, may_be_short=may_be_short)
    began_s = time.monotonic()
    tasks = []
    for conversation in conversations:
        due_s = began_s + (conversation.at_s or 0.0)
        await _sleep_until(due_s)
        tasks.append(asyncio.create_task(recorder.converse(conversation, due_s)))
    await asyncio.gather(*tasks)
    return recorder.traces


async def run_closed_loop(
    target: Target,
    conversations: Sequence[Dialogue],
    *,
    concurrency: int,
    think_s: float = 0.0,
    may_be_short: bool = False,
    progress: Progress = lambda _: None,
) -> list[RequestTrace]:
    """Keep ``concurrency`` conversations in progress until all are done; answers ``may_be_short``
    as in `run_open_loop`."""
    recorder = _Recorder(target, think_s, progress, may_be_short=may_be_short)
    waiting = iter(conversations)

    async def one_after_the_other() -> None:
        for conversation in waiting:
            await recorder.converse(conversation, time.monotonic())

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return recorder.traces


class _Recorder:
    def __init__(
        self, target: Target, think_s: float, progress: Progress, *, may_be_short: bool = False
    ) -> None:
        self._target = target
        self._think_s = think_s
        self._progress = progress
        self._may_be_short = may_be_short
        self.traces: list[RequestTrace] = []

    async def converse(self, conversation: Dialogue, due_s: float) -> None:
        """One turn after the other; a turn is due ``think_s`` after the answer before it."""
        history: tuple[int, ...] = ()
        for turn in conversation.turns:
            history += turn.new_token_ids
            trace, answer = await self._one(history, turn, conversation.user, due_s)
            self.traces.append(trace)
            self._progress(len(self.traces))
            if trace.error is not None:
                return
            history += answer
            due_s = trace.finished_s + self._think_s
            await _sleep_until(due_s)

    async def _one(
        self, prompt: tuple[int, ...], turn: Turn, user: int, due_s: float
    ) -> tuple[RequestTrace, tuple[int, ...]]:
        times: list[float] = []
        counts: list[int] = []
        answer: list[int] = []
        cached, prompt_tokens, queue_s, error, is_throttled = 0, len(prompt), None, None, False
        published_s: float | None = None
        sent_s = time.monotonic()
        try:
            async with aclosing(self._target.stream(prompt, turn.max_tokens)) as pieces:
                async for piece in pieces:
                    now_s = time.monotonic()
                    if piece.num_tokens:
                        times.append(now_s)
                        counts.append(piece.num_tokens)
                    if piece.is_shown and published_s is None:
                        published_s = now_s
                    answer.extend(piece.token_ids)
                    cached = piece.num_cached_tokens or cached
                    prompt_tokens = piece.num_prompt_tokens or prompt_tokens
                    queue_s = queue_s if piece.queue_s is None else piece.queue_s
        except (RidgelineError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            is_throttled = isinstance(problem, StatusError) and problem.status in THROTTLED
        is_short = sum(counts) != turn.max_tokens and not (self._may_be_short and counts)
        if error is None and is_short:
            error = f"{sum(counts)} tokens came instead of {turn.max_tokens}."
        trace = RequestTrace(
            scheduled_s=due_s,
            sent_s=sent_s,
            finished_s=time.monotonic(),
            num_prompt_tokens=prompt_tokens,
            chunk_times_s=tuple(times),
            chunk_tokens=tuple(counts),
            published_s=published_s,
            num_cached_tokens=cached,
            queue_s=queue_s,
            user=user,
            error=error,
            is_throttled=is_throttled,
        )
        # A server that names no tokens gets others of the same number: its cache misses them.
        missing = turn.max_tokens - len(answer)
        return trace, (*answer, *turn.new_token_ids[:1] * max(0, missing))


async def _sleep_until(due_s: float) -> None:
    delay_s = due_s - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
