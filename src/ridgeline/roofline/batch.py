"""What of a pass sets its cost: how many tokens, over which contexts, and rows of logits."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ridgeline.core.context_ranks import LEAST_TOKENS
from ridgeline.core.plan import Pass, Segment
from ridgeline.core.rounding import ceil_div

Integers = npt.NDArray[np.int64]
NO_ADAPTERS: Mapping[int, int] = {}
_EVERYTHING = 2**31  # tokens


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """One forward pass: segment i computes positions ``[starts[i], stops[i])``.

    ``logit_rows`` are the positions of all segments whose logits are wanted. ``adapters`` are the
    LoRA adapters in use, each with the tokens that go through it. In layers without a window,
    tokens of segment i see the last ``windows[i]`` tokens, and the first ``sinks[i]``. K and V of
    ``num_reused`` tokens are taken over from where they were computed before.
    """

    starts: Integers
    stops: Integers
    logit_rows: int
    adapters: tuple[tuple[int, int], ...] = ()
    windows: Integers | None = None
    sinks: Integers | None = None
    num_reused: int = 0

    @cached_property
    def num_tokens(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def num_segments(self) -> int:
        return len(self.starts)

    def shared_by(self, context_ranks: int) -> npt.NDArray[np.bool_]:
        """The segments that context-parallel ranks share (`core.sharding.is_shared`)."""
        least = LEAST_TOKENS * context_ranks if context_ranks > 1 else _EVERYTHING
        return self.stops - self.starts >= least

    def visible_pairs(self, window: int | None, *, chunked: bool = False) -> int:
        """(query, key) pairs that attention needs: each position sees itself and those before it,
        ``window`` of them at the most, or those of its chunk."""
        if window is None and self.windows is not None and self.sinks is not None:
            seen = self.windows + self.sinks
            return int((_capped(self.stops, seen) - _capped(self.starts, seen)).sum())
        if window is None:
            return int((_triangle(self.stops) - _triangle(self.starts)).sum())
        count = _in_chunks if chunked else _capped
        return int((count(self.stops, window) - count(self.starts, window)).sum())

    def mutual_pairs(self, window: int | None) -> int:
        """Pairs where attention goes both ways over whole sequences, ``window`` to each side."""
        return 2 * self.visible_pairs(window) - self.num_tokens

    def square_pairs(self, window: int | None, *, chunked: bool = False) -> int:
        """Pairs of a kernel that computes masked scores too, as the reference does."""
        return int(((self.stops - self.starts) * self._rows_read(window, chunked)).sum())

    def kv_rows(self, window: int | None, *, chunked: bool = False) -> int:
        """Tokens whose K and V are read, once for each segment."""
        return int(self._rows_read(window, chunked).sum())

    def loaded_rows(
        self, window: int | None, heads: int, rows: int, *, chunked: bool = False
    ) -> int:
        """Tokens whose K and V a kernel loads for one KV head: once for every ``rows`` of the rows
        of queries, ``heads`` for each token."""
        loads = ceil_div((self.stops - self.starts) * heads, rows)
        return int((loads * self._rows_read(window, chunked)).sum())

    def _rows_read(self, window: int | None, chunked: bool) -> Integers:
        if window is None and self.windows is not None and self.sinks is not None:
            behind = np.maximum(0, self.starts - self.windows + 1)
            rows: Integers = self.stops - np.maximum(0, behind - self.sinks)
            return rows
        if window is None:
            return self.stops
        if chunked:
            return self.stops - self.starts // window * window
        return self.stops - np.maximum(0, self.starts - window + 1)


def make_batch(ranges: Sequence[tuple[int, int]], logit_rows: int | None = None) -> BatchShape:
    """A batch of half-open ranges; without ``logit_rows`` each yields the logits of its last."""
    bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    rows = len(ranges) if logit_rows is None else logit_rows
    return BatchShape(starts=bounds[:, 0], stops=bounds[:, 1], logit_rows=rows)


def decode_batch(batch_size: int, context: int) -> BatchShape:
    """``batch_size`` sequences that each compute one token, with ``context`` tokens in all."""
    return make_batch([(context - 1, context)] * batch_size)


def prefill_batch(num_tokens: int, *, batch_size: int = 1, start: int = 0) -> BatchShape:
    """``batch_size`` prompts' chunks of ``num_tokens`` tokens after ``start``."""
    return make_batch([(start, start + num_tokens)] * batch_size)


def batch_of(segments: Sequence[Segment], adapters: Mapping[int, int] = NO_ADAPTERS) -> BatchShape:
    """The batch that segments of a pass make; ``adapters`` are those of slots that have one."""
    bounds: list[int] = []
    rows = num_reused = 0
    for segment in segments:
        for reuse in segment.reuses:
            num_reused += reuse.num_tokens
        bounds += (segment.start, segment.stop)
        outputs = segment.outputs
        if outputs.every_position:
            rows += segment.num_tokens
        elif outputs.sample:
            rows += 1 + segment.num_drafts
    array = np.array(bounds, dtype=np.int64).reshape(-1, 2)
    used = _adapters_of(((s.slot, s.num_tokens) for s in segments), adapters)
    windows, sinks = _windows_of(segments)
    return BatchShape(
        starts=array[:, 0],
        stops=array[:, 1],
        logit_rows=rows,
        adapters=used,
        windows=windows,
        sinks=sinks,
        num_reused=num_reused,
    )


def batches_of(a_pass: Pass, adapters: Mapping[int, int] = NO_ADAPTERS) -> list[BatchShape]:
    """The forward passes of a pass: one, or ``num_steps`` where sampled tokens are fed back.

    Those that deepen a tree compute the last known token and the nodes so far, as many as there may
    be at the most.
    """
    first = batch_of(a_pass.segments, adapters)
    if a_pass.num_steps == 1:
        return [first]
    if a_pass.num_nodes:
        return [first, *(_deeper(a_pass, step, adapters) for step in range(1, a_pass.num_steps))]
    used = _adapters_of(((segment.slot, 1) for segment in a_pass.segments), adapters)
    replayed = [
        BatchShape(
            starts=first.stops + step,
            stops=first.stops + step + 1,
            logit_rows=len(first.stops),
            adapters=used,
            windows=first.windows,
            sinks=first.sinks,
        )
        for step in range(a_pass.num_steps - 1)
    ]
    return [first, *replayed]


def _deeper(a_pass: Pass, step: int, adapters: Mapping[int, int]) -> BatchShape:
    nodes = a_pass.nodes_at(step)
    segments = (
        each._replace(
            start=each.stop - 1,
            stop=each.stop + nodes,
            token_ids=(0,) * (1 + nodes),
            num_drafts=nodes,
        )
        for each in a_pass.segments
    )
    return batch_of(tuple(segments), adapters)


def _windows_of(segments: Sequence[Segment]) -> tuple[Integers | None, Integers | None]:
    """Windows and sinks of segments, of which those without see everything."""
    if all(segment.window is None for segment in segments):
        return None, None
    of_all = [segment.window or (0, _EVERYTHING) for segment in segments]
    array = np.array(of_all, dtype=np.int64).reshape(-1, 2)
    return array[:, 1], array[:, 0]


def _adapters_of(
    tokens: Iterable[tuple[int, int]], adapters: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Adapters and their tokens, of (slot, tokens) of segments."""
    if not adapters:
        return ()
    counts = Counter[int]()
    for slot, num_tokens in tokens:
        if slot in adapters:
            counts[adapters[slot]] += num_tokens
    return tuple(sorted(counts.items()))


def _triangle(length: Integers) -> Integers:
    return length * (length + 1) // 2


def _capped(length: Integers, window: int | Integers) -> Integers:
    """Σ over positions below ``length`` of what each sees behind a window."""
    inside = np.minimum(length, window)
    return _triangle(inside) + (length - inside) * window


def _in_chunks(length: Integers, size: int) -> Integers:
    """Σ over positions below ``length`` of what each sees of its chunk."""
    whole, rest = np.divmod(length, size)
    return whole * (size * (size + 1) // 2) + _triangle(rest)
