"""Moves blocks between the pool and the tiers, on a thread of its own.

Each block that enters the prefix cache is written to the tiers behind the engine's back. So when a
sequence loses its blocks, or a prefix is evicted, there is nothing left to save, and coming back is
a load into the prefix cache: a swap is a hit. While a transfer is under way it holds the blocks.

A hit in the pool counts as a use in the tiers too, and what they have evicted of it is written once
more: otherwise the start of a prefix that is always in the pool would be the first to go, and
without it what follows cannot be loaded.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from math import inf

from ridgeline.kvcache.block_pool import NO_BLOCK
from ridgeline.kvcache.prefix_cache import Match, Node, PrefixCache, block_key
from ridgeline.kvcache.tiers.coming import ComingEntries
from ridgeline.kvcache.tiers.peer import PeerFigures, PeerTier
from ridgeline.kvcache.tiers.tier import BlockIO, Tier
from ridgeline.kvcache.tiers.transfer_thread import (
    Delete,
    Load,
    Look,
    Save,
    Touch,
    TransferStats,
    TransferThread,
)

_CANCEL_BATCH = 4  # saves that are given up at once
FLUSH_S = 3.0  # a server ends a process that takes longer to stop; see `ProcessHost`


class Transfers:
    """Owns the tiers, fastest first. Its methods are for the thread that schedules.

    Without a thread, transfers are made when `poll` is called. What is to be saved is ``coming``
    until it is there.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tiers: Sequence[Tier],
        block_io: BlockIO,
        *,
        in_thread: bool = True,
        coming: ComingEntries | None = None,
    ) -> None:
        self.stats = TransferStats()
        self._cache = cache
        self._tiers = tuple(tiers)
        self._limit = max(8, min(pool.num_blocks for pool in cache.pools) // 2)
        self._saves: dict[Node, Save] = {}
        self._loads: dict[Load, None] = {}
        self._num_looks = 0
        self._touched: dict[Node, None] = {}  # to be told to the tiers
        self._is_touching = False
        self._coming = coming or ComingEntries()
        self._thread = TransferThread(
            self._tiers, block_io, self.stats, self._coming, in_thread=in_thread
        )

    @property
    def is_busy(self) -> bool:
        """Whether transfers hold blocks that will come free, or somebody waits for a look."""
        return bool(self._loads or self._saves or self._num_looks)

    @property
    def peers(self) -> PeerFigures | None:
        """Who KV is read of and given to, where that is so."""
        found = (tier.figures() for tier in self._tiers if isinstance(tier, PeerTier))
        return next(found, None)

    def block_s(self, level: int) -> float:
        """Expected seconds to load a block out of a tier; 0 where that is not known."""
        get_s = self._thread.get_s[level].mean_s
        return get_s + self._thread.import_s.mean_s if get_s else 0.0

    def save(self, node: Node) -> None:
        """Write a node of the cache to the tiers, unless that was done or it has lost blocks."""
        if node.is_kept or NO_BLOCK in node.blocks:
            return
        if len(self._saves) >= self._limit:
            self.stats.skipped_blocks += 1
            return
        node.is_kept = True
        save = Save(node, list(node.blocks))
        for pool, block in zip(self._cache.pools, save.blocks, strict=True):
            pool.share([block])
        self._saves[node] = save
        self._coming.add(node.key)
        self._thread.put(save)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Nodes, parents first, were found in the pool: their entries count as used.

        Those that were evicted from the last tier are written again. All that is here done at once
        is to note the nodes.
        """
        self._touched.update(dict.fromkeys(nodes))

    def find(self, root_key: bytes, match: Match, token_ids: Sequence[int]) -> tuple[int, float]:
        """How many blocks after a match the tiers seem to have, and the seconds to load them."""
        levels = [self._level(key) for key, _ in self._held_after(root_key, match, token_ids)]
        return len(levels), sum(self.block_s(level) for level in levels if level is not None)

    def look(self, root_key: bytes, match: Match, token_ids: Sequence[int]) -> Look | None:
        """Have the tiers find out what they have after a match, where they are unsure of it."""
        keys = []
        for key, _ in self._keys_after(root_key, match, token_ids):
            if self._level(key) is not None:
                continue
            if not any(tier.is_unsure(key) for tier in self._tiers):
                break
            keys.append(key)
        if not keys:
            return None
        look = Look(keys)
        self._num_looks += 1
        self._thread.put(look)
        return look

    def load(
        self, root_key: bytes, match: Match, token_ids: Sequence[int], *, limit_s: float = inf
    ) -> Load | None:
        """Start to load what the tiers have after a match, as far as blocks are free.

        After ``limit_s`` it ends with what is there.
        """
        keys, tokens = [], []
        for key, token_ids_of in self._held_after(root_key, match, token_ids):
            keys.append(key)
            tokens.append(token_ids_of)
        for group, pool in enumerate(self._cache.pools):
            pool.share(match.tables[group])  # and so they are not evicted for what comes
        count = self._num_that_fit(len(match.nodes), len(keys))
        if not count:
            self._release(match.tables)
            return None
        tables = []
        for group, pool in enumerate(self._cache.pools):
            first = self._first_needed(group, len(match.nodes), count)
            tables.append([NO_BLOCK] * first + pool.allocate(count - first))
        load = Load(root_key, match, tokens[:count], keys[:count], tables, [], limit_s)
        self._loads[load] = None
        self._thread.put(load)
        return load

    def poll(self) -> None:
        """Take note of transfers that are complete: loaded blocks enter the prefix cache."""
        if self._touched and not self._is_touching:
            self._thread.put(Touch(list(self._touched)))
            self._touched.clear()
            self._is_touching = True
        for done in self._thread.finished():
            match done:
                case Load():
                    self._land(done)
                case Look():
                    done.is_done = True
                    self._num_looks -= 1
                case Touch():
                    self._is_touching = False
                    self._save_again(done.gone)
                case _:
                    self._end_saves(done)

    def delete_tenant(self, tenant: str, done: Callable[[], None]) -> None:
        """Have the tiers forget what was computed for a tenant, what is under way included.

        ``done`` is called by the thread once they have.
        """
        for load in self._loads:
            load.deleted.add(tenant)
        self._thread.put(Delete(tenant, done, self._tiers))

    def cancel_saves(self) -> bool:
        """Give up the latest saves that have not begun and alone hold a block; whether there were.

        Some at a time: of a sequence that lost its blocks, as much as possible is to be saved.
        """
        cancelled = []
        for save in reversed(self._saves.values()):
            if self._is_alone(save) and self._thread.cancel(save):
                cancelled.append(save)
                if len(cancelled) == _CANCEL_BATCH:
                    break
        self._coming.discard([save.node.key for save in cancelled])
        for save in cancelled:
            del self._saves[save.node]
            save.node.is_kept = False
            self._release([[block] for block in save.blocks])
        self.stats.skipped_blocks += len(cancelled)
        return bool(cancelled)

    def held(self, group: int) -> Counter[int]:
        """The blocks of a group that transfers hold."""
        held: Counter[int] = Counter()
        for save in self._saves.values():
            held[save.blocks[group]] += 1
        for load in self._loads:
            held.update(load.match.tables[group])
            held.update(load.tables[group])
        del held[NO_BLOCK]
        return held

    def close(self) -> None:
        """Finish what was begun, for at most `FLUSH_S`, and close the tiers."""
        self._thread.close(FLUSH_S)
        for tier in self._tiers:
            tier.close()

    def _keys_after(
        self, root_key: bytes, match: Match, token_ids: Sequence[int]
    ) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Keys and tokens of the blocks after a match, all but the one that ends the tokens."""
        size = self._cache.block_tokens
        key = match.nodes[-1].key if match.nodes else root_key
        for start in range(len(match.nodes) * size, len(token_ids) - size, size):
            tokens = tuple(token_ids[start : start + size])
            key = block_key(key, tokens)
            yield key, tokens

    def _held_after(
        self, root_key: bytes, match: Match, token_ids: Sequence[int]
    ) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Those of them that some tier may have, without a gap."""
        after = self._keys_after(root_key, match, token_ids)
        return takewhile(lambda each: self._level(each[0]) is not None, after)

    def _level(self, key: bytes) -> int | None:
        """The first tier that may have an entry."""
        return next((n for n, tier in enumerate(self._tiers) if tier.may_have(key)), None)

    def _first_needed(self, group: int, num_matched: int, count: int) -> int:
        """Of ``count`` nodes after a match, the first whose KV the tokens after them can see."""
        end = (num_matched + count) * self._cache.block_tokens
        return max(0, self._cache.first_visible_block(group, end) - num_matched)

    def _num_that_fit(self, num_matched: int, count: int) -> int:
        def fits(count: int) -> bool:
            return all(
                count - self._first_needed(group, num_matched, count) <= pool.num_free
                for group, pool in enumerate(self._cache.pools)
            )

        while count and not fits(count):
            count -= 1
        return count

    def _is_alone(self, save: Save) -> bool:
        """Whether some block comes free if the save lets go of it."""
        pairs = zip(self._cache.pools, save.blocks, strict=True)
        return any(not pool.is_shared(block) for pool, block in pairs)

    def _end_saves(self, saves: Sequence[Save]) -> None:
        for save in saves:
            if self._saves.get(save.node) is save:
                del self._saves[save.node]
                self._release([[block] for block in save.blocks])

    def _save_again(self, nodes: Sequence[Node]) -> None:
        """Write nodes whose entries are gone; under the same numbers, which children refer to."""
        for node in nodes:
            if node not in self._saves:
                node.is_kept = False
                self.save(node)

    def _land(self, load: Load) -> None:
        del self._loads[load]
        load.is_done = True
        node = load.match.nodes[-1] if load.match.nodes else None
        for number, header in enumerate(load.headers):
            if header.tenant in load.deleted:
                break
            inserted = self._cache.insert(
                load.root_key,
                node,
                load.token_ids[number],
                [table[number] for table in load.tables],
                tenant=header.tenant,
            )
            if inserted is None:
                break
            node = inserted
            if not node.is_kept:
                node.is_kept = True
            self.stats.loaded_blocks += 1
        if node is not None:
            self._cache.prune(node)
        self._release(load.match.tables)
        self._release(load.tables)

    def _release(self, tables: Sequence[list[int]]) -> None:
        for pool, table in zip(self._cache.pools, tables, strict=True):
            pool.release(table)
