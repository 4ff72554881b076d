"""The states that one sequence holds of one model: the one that runs, and checkpoints of it."""

import sys
from collections.abc import Sequence

from ridgeline.core.plan import BlockCopy, BlockTableUpdate, StateSave
from ridgeline.core.rounding import round_up
from ridgeline.kvcache.prefix_cache import Node, PrefixCache

_NEVER = sys.maxsize - 1


class SequenceStates:
    """A block of the states' pool in which the sequence's state runs, and blocks for checkpoints.

    A checkpoint is the state before the token at a position that is a whole number of KV blocks; it
    belongs to the node of the block before it. One is saved at the end of the prompt, every
    `PrefixCache.state_tokens`, where the prompt parts from one that was computed before, and in the
    output at each block, where only the last is kept: so what follows an answer finds the answer.
    What the pool has no block for is not saved. A checkpoint among drafts is saved in the step
    after, which takes in those that stayed.
    """

    __slots__ = (
        "_cache",
        "_copy",
        "_group",
        "_is_cached",
        "_is_sent",
        "_last",
        "_marks",
        "_pending",
        "_pool",
        "_running",
        "_start",
    )

    def __init__(self, cache: PrefixCache, *, is_cached: bool) -> None:
        self._cache = cache
        self._group = len(cache.windows)
        self._pool = cache.pools[self._group]
        self._is_cached = is_cached  # whether checkpoints are saved
        self._running: int | None = None
        self._is_sent = False  # whether the executor was told of it
        self._copy: int | None = None  # the checkpoint that it starts from, until it was copied
        self._start = 0  # the position of that
        self._marks: tuple[int, ...] = ()  # positions of checkpoints to keep
        self._pending: dict[int, int] = {}  # by position, blocks that plans in flight save to
        self._last: Node | None = None  # whose checkpoint the output's next one replaces

    @property
    def held(self) -> list[int]:
        """The blocks that are held, each once."""
        single = (block for block in (self._running, self._copy) if block is not None)
        return [*single, *self._pending.values()]

    @property
    def next_note(self) -> int:
        """The number of computed tokens at which the next checkpoint has been saved."""
        return min(self._pending, default=_NEVER) + 1

    def start_from(self, checkpoint: int | None, position: int, marks: Sequence[int]) -> None:
        """Begin with a checkpoint (``None``: with nothing), and keep those at ``marks``."""
        if checkpoint is not None:
            self._pool.share([checkpoint])
        self._copy, self._start = checkpoint, position
        self._marks = tuple(marks)

    def can_write(self) -> bool:
        """Whether there is a block for the state to run in."""
        return self._running is not None or self._pool.num_free > 0

    def next_save(self, position: int) -> int:
        """The first position after this one at which a checkpoint may be due."""
        size = self._cache.block_tokens
        return (position // size + 1) * size

    def prepare_write(
        self, start: int, stop: int
    ) -> tuple[list[BlockTableUpdate], list[BlockCopy], list[StateSave]]:
        """What the executor must be told before the state takes in positions ``[start, stop)``."""
        updates, copies = [], []
        if self._running is None:
            (self._running,) = self._pool.allocate(1)
            if self._copy is not None:
                copies.append(BlockCopy(group=self._group, source=self._copy, target=self._running))
        if not self._is_sent:
            updates.append(BlockTableUpdate(group=self._group, first=0, blocks=(self._running,)))
            self._is_sent = True
        saves = []
        for position in self._due(start, stop):
            if position not in self._pending and self._pool.num_free:
                (block,) = self._pool.allocate(1)
                self._pending[position] = block
                saves.append(StateSave(position, block))
        return updates, copies, saves

    def advance(self, num_computed: int, nodes: Sequence[Node]) -> None:
        """So many tokens are computed; ``nodes`` are those of the prefix cache of their blocks."""
        if self._copy is not None:
            self._pool.release([self._copy])
            self._copy = None
        for position in [each for each in self._pending if each < num_computed]:
            block = self._pending.pop(position)
            index = position // self._cache.block_tokens - 1
            if index < len(nodes):
                self._keep(nodes[index], position, block)
            self._pool.release([block])

    def start_again(self) -> None:
        """What plans told the executor was not done, nor will be: neither saved, nor taken."""
        self._is_sent = False
        self._pool.release(list(self._pending.values()))
        self._pending.clear()

    def release(self) -> None:
        """Give everything back."""
        self._pool.release(self.held)
        self._running = self._copy = self._last = None
        self._is_sent = False
        self._pending.clear()
        self._marks, self._start = (), 0

    def _keep(self, node: Node, position: int, block: int) -> None:
        """Cache a checkpoint, which is held, in place of the output's last if that is to go."""
        if self._last is not None:
            self._cache.drop_state(self._last)
            self._last = None
        if self._cache.add_state(node, block) and not self._is_kept(position):
            self._last = node

    def _due(self, start: int, stop: int) -> list[int]:
        """The positions within ``[start, stop)`` at which the state is to be saved.

        In the output, each whole block; of those of one step, the last.
        """
        if not self._is_cached:
            return []
        size = self._cache.block_tokens
        first = max(self._start + 1, start)
        due = [mark for mark in self._marks if first <= mark < stop]
        interval = self._cache.state_tokens
        due += range(round_up(first, interval), stop, interval)
        last = (stop - 1) // size * size
        if last >= first and last > max(self._marks, default=0):
            due.append(last)
        return sorted(set(due) - {0})

    def _is_kept(self, position: int) -> bool:
        return position in self._marks or position % self._cache.state_tokens == 0
