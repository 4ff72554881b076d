"""Penalties and logit bias, applied to a row of logits before the native sampler draws from it."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.sampling_params import SamplingParams

_MIN_ENTRIES = 64


class TokenCounts:
    """How often each token is in a sequence that grows and shrinks, as arrays.

    What a change costs does not depend on the length of the sequence.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.array(token_ids, dtype=np.int64), return_counts=True)
        self._size = len(ids)
        room = max(_MIN_ENTRIES, 2 * self._size)
        self._ids, self._counts = np.zeros((2, room), dtype=np.int64)
        self._ids[: self._size], self._counts[: self._size] = ids, counts
        self._places = {token: place for place, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The different tokens, in no order."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each of `ids` is there: 1 or more."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._size
            if place == len(self._ids):
                grown = np.zeros((2, 2 * place), dtype=np.int64)
                grown[0, :place], grown[1, :place] = self._ids, self._counts
                self._ids, self._counts = grown
            self._ids[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1

    def remove(self, token: int) -> None:
        """Take away one of those that were added."""
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        self._size -= 1
        last = self._size
        self._ids[place], self._counts[place] = self._ids[last], self._counts[last]
        self._places[int(self._ids[place])] = place
        del self._places[token]


class CountedHistory:
    """The tokens before the one that is drawn, counted: all of them, and those of the output.

    It follows a list of known tokens: `advance` counts what is new of it, and `forget` takes back
    what is about to be overwritten.
    """

    def __init__(self, num_prompt_tokens: int, token_ids: Sequence[int] = ()) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._counted = list(token_ids)
        self.every = TokenCounts(self._counted)
        self.output = TokenCounts(self._counted[num_prompt_tokens:])

    def advance(self, known: Sequence[int], stop: int) -> None:
        """Count exactly ``known[:stop]``, of which what was counted before has not changed."""
        self.forget(stop)
        self.extend(known[len(self._counted) : stop])

    def extend(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self.every.add(token)
            if len(self._counted) >= self._num_prompt_tokens:
                self.output.add(token)
            self._counted.append(token)

    def forget(self, start: int) -> None:
        """Take back the tokens from position ``start`` on."""
        while len(self._counted) > start:
            token = self._counted.pop()
            self.every.remove(token)
            if len(self._counted) >= self._num_prompt_tokens:
                self.output.remove(token)

    def __len__(self) -> int:
        return len(self._counted)


def adjust(
    logits_V: npt.NDArray[np.float32], params: SamplingParams, history: CountedHistory | None
) -> npt.NDArray[np.float32]:
    """A copy of the row, changed as `ridgeline.decoding.sampling.process_logits` does it.

    ``history`` is needed for penalties alone.
    """
    row = logits_V.copy()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if not params.has_penalties:
        return row
    assert history is not None, "penalties look at what came before"
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        seen = history.every.ids
        kept = row[seen]
        row[seen] = np.where(kept > 0, kept / factor, kept * factor)
    row[history.output.ids] -= np.float32(
        params.frequency_penalty
    ) * history.output.counts + np.float32(params.presence_penalty)
    return row
