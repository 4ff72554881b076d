"""Outputs on their way through a guard: what is held back of them, and how they end there."""

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable

from msgspec.structs import replace

from ridgeline.core.request import CompletionChunk, FinishReason, PromptReport
from ridgeline.engine.guard.guard import Guard
from ridgeline.engine.guard.scorer import Decision, End, Hold, Release, Retract

Piece = tuple[int, CompletionChunk]


class GuardedSample:
    """One output between the engine and whoever reads it.

    Characters are counted from the beginning of the output. A token, with its log-probability, goes
    out once text after that of its chunk does, since some of its own may come with a later one.
    Without ``streams`` nothing goes out before the end, and so nothing has to be taken back.
    ``in_whole_chunks``: text goes out with its tokens, until the end.
    """

    def __init__(self, guard: Guard, *, streams: bool, in_whole_chunks: bool) -> None:
        self._guard = guard
        self._streams = streams
        self._in_whole_chunks = in_whole_chunks
        self.judged = guard.open()
        self._parts: deque[tuple[int, CompletionChunk]] = deque()  # with where its text ends
        self._allowed = self._sent = 0
        self._cut = (0, 0)  # what is taken back of the text that is allowed
        self._reason: str | None = None  # why the guard ended it
        self._is_final = False

    @property
    def has_ended(self) -> bool:
        return self._is_final

    def skip(self, chunk: CompletionChunk) -> None:
        """Take a chunk that is out already."""
        self.judged.text += chunk.text
        self._allowed = self._sent = len(self.judged.text)
        self._is_final = chunk.finish_reason is not None

    async def take(self, chunk: CompletionChunk) -> CompletionChunk | None:
        """Judge a chunk; returns what may go out now, if anything may."""
        text = self.judged.text = self.judged.text + chunk.text
        self._parts.append((len(text), chunk))
        self._is_final = chunk.finish_reason is not None
        if text and (chunk.text or self._is_final):
            self._apply(await self._guard.see(self.judged, final=self._is_final))
        if self._is_final and self._reason is None and self._allowed < len(text):
            self._reason = "guard_held"
        self._is_final = self._is_final or self._reason is not None
        return self._out(chunk)

    def _apply(self, decision: Decision) -> None:
        length = len(self.judged.text)
        match decision:
            case Release(num_chars=count):
                self._allow(min(count, length if self._is_final else self._outside_window()))
            case End(reason=reason, num_chars=count):
                self._allow(min(count, length))
                self._reason = reason
            case Retract(start=start, stop=stop, reason=reason):
                start = min(max(start, 0), length)
                self._allow(start)
                self._cut = (start, max(start, min(stop, self._allowed)))
                self._reason = reason
            case Hold():
                pass

    def _allow(self, num_chars: int) -> None:
        self._allowed = max(self._allowed, num_chars)

    def _outside_window(self) -> int:
        """Characters before those that are held back whatever the scorer says."""
        end = len(self.judged.text) - self._guard.window_chars
        left = self._guard.config.window_tokens
        for part_end, chunk in reversed(self._parts):
            if left <= 0:
                return min(end, part_end)
            left -= len(chunk.token_ids)
        first = self._parts[0]
        return min(end, first[0] - len(first[1].text))

    def _out(self, chunk: CompletionChunk) -> CompletionChunk | None:
        if not (self._streams or self._is_final):
            return None
        is_whole = self._is_final and self._reason is None
        parts, stop = [], self._sent
        while self._parts and (is_whole or self._parts[0][0] < self._allowed):
            stop, part = self._parts.popleft()
            if not self._is_cut(stop, part):
                parts.append(part)
        if self._is_final or not self._in_whole_chunks:
            stop = self._allowed
        text, retracted = self._text(stop)
        token_ids = tuple(token for part in parts for token in part.token_ids)
        if not (text or token_ids or self._is_final):
            return None
        ends = {}
        if self._reason is not None:
            ends = {"finish_reason": FinishReason.CONTENT_FILTER, "stop_reason": self._reason}
        return replace(
            chunk,
            text=text,
            token_ids=token_ids,
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            retracted=retracted,
            **ends,
        )

    def _text(self, end: int) -> tuple[str, tuple[int, int] | None]:
        """What goes out of the text up to ``end``, and what is taken back of what went out."""
        (start, stop), sent = self._cut, self._sent
        text, self._sent = self.judged.text, end
        if start == stop:
            return text[sent:end], None
        taken = start, min(stop, sent)
        shown = text[sent:start] + text[max(sent, stop) : end]
        return shown, taken if start < taken[1] else None

    def _is_cut(self, end: int, part: CompletionChunk) -> bool:
        start, stop = self._cut
        return start < stop and end >= start and end - len(part.text) < stop


async def guarded(
    pieces: AsyncGenerator[Piece, None],
    guard: Guard,
    *,
    num_samples: int,
    num_prompts: int,
    streams: bool,
    in_whole_chunks: bool = False,
    is_known: Callable[[CompletionChunk], bool] = lambda _: False,
) -> AsyncGenerator[Piece, None]:
    """What may go out of the pieces of outputs, each with the number of its own.

    Chunks that are ``is_known`` are out already: of them only the text counts. Output ``i`` is of
    prompt ``i // num_samples``. The report of a prompt comes with the first piece of one of its
    outputs. Once all have ended the rest is not generated.
    """
    samples = [
        GuardedSample(guard, streams=streams, in_whole_chunks=in_whole_chunks)
        for _ in range(num_prompts * num_samples)
    ]
    reports: dict[int, PromptReport] = {}
    num_open, in_progress = len(samples), set(range(len(samples)))
    try:
        async with contextlib.aclosing(pieces):
            async for index, chunk in pieces:
                prompt, sample = index // num_samples, samples[index]
                if chunk.finish_reason is not None:
                    in_progress.discard(index)
                if chunk.prompt is not None:
                    reports[prompt] = chunk.prompt
                if is_known(chunk):
                    sample.skip(chunk)
                    yield index, chunk
                elif sample.has_ended or (found := await sample.take(chunk)) is None:
                    continue
                else:
                    yield index, replace(found, prompt=reports.pop(prompt, None))
                num_open -= sample.has_ended
                if not num_open and in_progress:
                    return
    finally:
        for sample in samples:
            guard.close_sample(sample.judged)
