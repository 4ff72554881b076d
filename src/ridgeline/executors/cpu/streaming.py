"""Weights that stay on disk: what a step needs is read ahead of it, and dropped behind it.

The packed weights of a model are a mapped file (`packed_file`). Here the pages of each product's
weights are read by a thread before the product runs, as many products ahead as a limit of bytes
allows, and are given back after it. What fits beside two of the largest stays in memory for good,
spread evenly over the model, so that the disk never waits long.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ridgeline.core import ops
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.core.spec import ModelSpec
from ridgeline.core.weight_uses import weight_uses
from ridgeline.executors.cpu.weights import PackedWeights
from ridgeline.kernels.cpu.memory import Bytes, drop_pages, read_pages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStage:
    """Native ops up to ``stop``, of which one has the weights ``arrays``."""

    stop: int
    arrays: tuple[Bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class StreamedWeights:
    """Reads the weights of a model's stages in their order, again and again.

    Args:
        model_ops: the native ones of the program, in its order.
        limit_bytes: of weights in memory at a time; vectors and rows of the embedding, of which a
            token reads one, are beside it.

    Raises:
        SettingsError: the limit does not hold the head and two of the largest products.
    """

    def __init__(
        self, weights: PackedWeights, model_ops: Sequence[ops.Op], limit_bytes: int
    ) -> None:
        of_logits = (ops.Head, ops.GatherLogits)  # run by themselves
        heads = [
            array for op in model_ops if isinstance(op, of_logits) for array in _arrays(weights, op)
        ]
        layers = [op for op in model_ops if not isinstance(op, of_logits)]
        self.stages = tuple(_stages(weights, layers))
        sizes = [stage.num_bytes for stage in self.stages]
        of_head = sum(array.nbytes for array in heads)
        least = of_head + 2 * max(sizes)
        if limit_bytes < least:
            raise SettingsError(
                f"weights_memory_bytes must be at least {least:,}: the head ({of_head:,} bytes) "
                f"and two of the largest products ({max(sizes):,} each)."
            )
        self._kept = _evenly(sizes, limit_bytes - least)
        self.kept_bytes = of_head + sum(sizes[stage] for stage in self._kept)
        self.streamed_bytes = of_head + sum(sizes) - self.kept_bytes  # of each step
        self._tables = tuple(_tables(weights, model_ops))
        self._order = [stage for stage in range(len(sizes)) if stage not in self._kept]
        self._room = limit_bytes - self.kept_bytes  # left
        self._next = 0  # of ``_order``, to be read
        self._ahead: deque[tuple[int, Future[None]]] = deque()  # stages that are read, or will be
        self._reader = ThreadPoolExecutor(1, "weights")
        kept = [array for stage in self._kept for array in self.stages[stage].arrays]
        start = time.perf_counter()
        read_pages((*heads, *kept))
        self.read_s = time.perf_counter() - start  # of what is kept
        self._read_ahead()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def run(self, run_native: Callable[[int, int], None]) -> None:
        """Run all native ops, in ranges, each while its weights are in memory.

        Raises what running raises, and:
            EngineError: they cannot be read.
        """
        first = 0
        for number, stage in enumerate(self.stages):
            if number in self._kept:
                run_native(first, stage.stop)
            else:
                self._wait_for(number)
                run_native(first, stage.stop)
                self._give_back(number)
            first = stage.stop
        drop_pages(self._tables)  # whose rows were read

    def _wait_for(self, stage: int) -> None:
        """Have a stage in memory, which is the next one, unless a step before ended early."""
        while True:
            read, is_read = self._ahead.popleft()
            try:
                is_read.result()
            except OSError as error:
                raise EngineError(f"The packed weights cannot be read: {error}.") from error
            if read == stage:
                return
            self._give_back(read)

    def _give_back(self, stage: int) -> None:
        drop_pages(self.stages[stage].arrays)
        self._room += self.stages[stage].num_bytes
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Have as many stages read as there is room for."""
        while self._order:
            stage = self._order[self._next % len(self._order)]
            if self.stages[stage].num_bytes > self._room:
                return
            self._next += 1
            self._room -= self.stages[stage].num_bytes
            reading = self._reader.submit(read_pages, self.stages[stage].arrays)
            self._ahead.append((stage, reading))


def stream_weights(
    spec: ModelSpec, weights: PackedWeights, model_ops: Sequence[ops.Op], limit_bytes: int
) -> StreamedWeights:
    """Stream a model's weights, and say in the log what that comes to.

    Raises:
        SettingsError: the limit does not hold the head and two of the largest products.
    """
    streamed = StreamedWeights(weights, model_ops, limit_bytes)
    rate = streamed.kept_bytes / streamed.read_s
    _log.warning(
        "%s: %.2f GB of weights stay in memory, and %.2f GB are read from disk in every step: at "
        "the %.2f GB/s of the first, %.3g steps a second at most.",
        spec.model_type, streamed.kept_bytes / 1e9, streamed.streamed_bytes / 1e9, rate / 1e9,
        rate / max(streamed.streamed_bytes, 1),
    )  # fmt: skip
    return streamed


def _stages(weights: PackedWeights, layers: Sequence[ops.Op]) -> Iterator[WeightStage]:
    """One for each op with matrices that all tokens are multiplied with."""
    arrays: tuple[Bytes, ...] = ()
    for place, op in enumerate(layers):
        found = tuple(_arrays(weights, op))
        if found and arrays:
            yield WeightStage(stop=place, arrays=arrays)
            arrays = ()
        arrays = found or arrays
    yield WeightStage(stop=len(layers), arrays=arrays)


def _arrays(weights: PackedWeights, op: ops.Op) -> Iterator[Bytes]:
    names = {use.weight.name for use in weight_uses(op) if not use.role.is_table}
    for name, matrices in weights.matrices.items():
        if name.partition("/")[0] in names:
            yield from (matrix.data for matrix in matrices)


def _tables(weights: PackedWeights, model_ops: Sequence[ops.Op]) -> Iterator[Bytes]:
    """Embeddings that no head is tied to."""
    uses = [use for op in model_ops for use in weight_uses(op)]
    others = {use.weight.name for use in uses if not use.role.is_table}
    for name in {use.weight.name for use in uses if use.role.is_table} - others:
        yield from (matrix.data for matrix in weights.matrices.get(name, ()))


def _evenly(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Which of the stages stay, of that many bytes in all at most."""
    kept, kept_bytes, seen_bytes, share = [], 0, 0, room / sum(sizes)
    for stage, size in enumerate(sizes):
        seen_bytes += size
        if kept_bytes + size <= min(room, share * seen_bytes):
            kept.append(stage)
            kept_bytes += size
    return tuple(kept)
