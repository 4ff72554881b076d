"""Moves blocks between the pool and the tiers, on a thread of its own.

Each block that enters the prefix cache is written to the tiers behind the engine's back. So when a
sequence loses its blocks, or a prefix is evicted, there is nothing left to save, and coming back is
a load into the prefix cache: a swap is a hit. While a transfer is under way it holds the blocks.

A hit in the pool counts as a use in the tiers too, and what they have evicted of it is written once
more: otherwise the start of a prefix that is always in the pool would be the first to go, and
without it what follows cannot be loaded.
"""

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ridgeline.kvcache.block_pool import NO_BLOCK
from ridgeline.kvcache.prefix_cache import Match, Node, PrefixCache, block_key
from ridgeline.kvcache.tiers.entry import Entry, EntryHeader, digest
from ridgeline.kvcache.tiers.tier import BlockIO, Tier

_BATCH = 32  # blocks that are exported or imported at once, between two steps
_CANCEL_BATCH = 4  # saves that are given up at once
_SMOOTHING = 0.2
_EXPIRE_EVERY_S = 1.0  # while there are no jobs
FLUSH_S = 3.0  # a server ends a process that takes longer to stop; see `ProcessHost`


@dataclass(slots=True)
class TransferStats:
    """Blocks since the start. ``skipped``: not saved, for want of blocks or too many under way."""

    saved_blocks: int = 0
    skipped_blocks: int = 0
    loaded_blocks: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class _Save:
    node: Node
    blocks: list[int]
    is_cancelled: bool = False
    is_started: bool = False


@dataclass(slots=True, eq=False)
class _Touch:
    """Nodes that were found in the pool, parents first; ``gone`` are those without an entry."""

    nodes: list[Node]
    gone: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Delete:
    tenant: str
    done: Callable[[], None]


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are on their way into the prefix cache, after ``match``.

    ``tables[g][i]`` is where the KV of group g of node i goes, or `NO_BLOCK`. ``headers`` are those
    of the entries that were found, verified and imported, in order. ``deleted`` tenants are those
    whose KV must not enter the cache any more.
    """

    root_key: bytes
    match: Match
    token_ids: list[tuple[int, ...]]
    keys: list[bytes]
    tables: list[list[int]]
    headers: list[EntryHeader]
    deleted: set[str] = field(default_factory=set)
    is_done: bool = False


_Job = _Save | Load | _Touch | _Delete | None  # the last: an end


class Transfers:
    """Owns the tiers, fastest first. Its methods are for the thread that schedules.

    ``block_bytes[g]`` is the size of a block of group g. Without a thread, transfers are made when
    `poll` is called.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tiers: Sequence[Tier],
        block_io: BlockIO,
        *,
        in_thread: bool = True,
    ) -> None:
        self.stats = TransferStats()
        self._cache = cache
        self._tiers = tuple(tiers)
        self._io = block_io
        self._limit = max(8, min(pool.num_blocks for pool in cache.pools) // 2)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[_Save] | Load | _Touch] = queue.SimpleQueue()
        self._saves: dict[Node, _Save] = {}
        self._loads: dict[Load, None] = {}
        self._touched: dict[Node, None] = {}  # to be told to the tiers
        self._is_touching = False
        self._starting = threading.Lock()
        self._block_s: float | None = None  # running mean of the seconds that a block takes to load
        self._thread: threading.Thread | None = None
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
            self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether transfers hold blocks that will come free."""
        return bool(self._loads or self._saves)

    @property
    def block_s(self) -> float:
        """Expected seconds to load a block; 0 before the first."""
        return self._block_s or 0.0

    def save(self, node: Node) -> None:
        """Write a node of the cache to the tiers, unless that was done or it has lost blocks."""
        if node.is_kept or NO_BLOCK in node.blocks:
            return
        if len(self._saves) >= self._limit:
            self.stats.skipped_blocks += 1
            return
        node.is_kept = True
        save = _Save(node, list(node.blocks))
        for pool, block in zip(self._cache.pools, save.blocks, strict=True):
            pool.share([block])
        self._saves[node] = save
        self._jobs.put(save)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Nodes, parents first, were found in the pool: their entries count as used.

        Those that were evicted from the last tier are written again. All that is here done at once
        is to note the nodes.
        """
        self._touched.update(dict.fromkeys(nodes))

    def find(self, root_key: bytes, match: Match, token_ids: Sequence[int]) -> int:
        """How many blocks after a match the tiers seem to have."""
        return len(self._keys_after(root_key, match, token_ids)[0])

    def load(self, root_key: bytes, match: Match, token_ids: Sequence[int]) -> Load | None:
        """Start to load what the tiers have after a match, as far as blocks are free."""
        keys, tokens = self._keys_after(root_key, match, token_ids)
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
        load = Load(root_key, match, tokens[:count], keys[:count], tables, [])
        self._loads[load] = None
        self._jobs.put(load)
        return load

    def poll(self) -> None:
        """Take note of transfers that are complete: loaded blocks enter the prefix cache."""
        if self._touched and not self._is_touching:
            self._jobs.put(_Touch(list(self._touched)))
            self._touched.clear()
            self._is_touching = True
        if self._thread is None:
            self._work()
        while True:
            try:
                done = self._done.get_nowait()
            except queue.Empty:
                return
            match done:
                case Load():
                    self._land(done)
                case _Touch():
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
        self._jobs.put(_Delete(tenant, done))

    def cancel_saves(self) -> bool:
        """Give up the latest saves that have not begun and alone hold a block; whether there were.

        Some at a time: of a sequence that lost its blocks, as much as possible is to be saved.
        """
        cancelled = []
        with self._starting:
            for save in reversed(self._saves.values()):
                if not save.is_started and self._is_alone(save):
                    save.is_cancelled = True
                    cancelled.append(save)
                    if len(cancelled) == _CANCEL_BATCH:
                        break
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
        if self._thread is None:
            self._work()
        else:
            self._jobs.put(None)
            self._thread.join(FLUSH_S)
        for tier in self._tiers:
            tier.close()

    def _keys_after(
        self, root_key: bytes, match: Match, token_ids: Sequence[int]
    ) -> tuple[list[bytes], list[tuple[int, ...]]]:
        """Keys and tokens of the blocks after a match that some tier may have, without a gap."""
        size = self._cache.block_tokens
        keys, tokens = [], []
        key = match.nodes[-1].key if match.nodes else root_key
        for start in range(len(match.nodes) * size, len(token_ids) - size, size):
            tokens.append(tuple(token_ids[start : start + size]))
            key = block_key(key, tokens[-1])
            if not any(tier.may_have(key) for tier in self._tiers):
                tokens.pop()
                break
            keys.append(key)
        return keys, tokens

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

    def _is_alone(self, save: _Save) -> bool:
        """Whether some block comes free if the save lets go of it."""
        pairs = zip(self._cache.pools, save.blocks, strict=True)
        return any(not pool.is_shared(block) for pool, block in pairs)

    def _end_saves(self, saves: Sequence[_Save]) -> None:
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
                node.uid, node.is_kept = header.uid, True
            self.stats.loaded_blocks += 1
        if node is not None:
            self._cache.prune(node)
        self._release(load.match.tables)
        self._release(load.tables)

    def _release(self, tables: Sequence[list[int]]) -> None:
        for pool, table in zip(self._cache.pools, tables, strict=True):
            pool.release(table)

    # What follows runs on the thread.

    def _run(self) -> None:
        while self._do(self._next_jobs()):
            self._expire()

    def _work(self) -> None:
        while not self._jobs.empty():
            self._do(self._next_jobs())
        self._expire()

    def _expire(self) -> None:
        for tier in self._tiers:
            tier.expire()

    def _next_jobs(self) -> list[_Job]:
        """Some jobs, or none after a while."""
        try:
            jobs = [self._jobs.get(timeout=_EXPIRE_EVERY_S)]
        except queue.Empty:
            return []
        while len(jobs) < _BATCH and not self._jobs.empty():
            jobs.append(self._jobs.get())
        return jobs

    def _do(self, jobs: list[_Job]) -> bool:
        """Do jobs in order, saves that follow each other at once; false at the end."""
        for is_save, run in groupby(jobs, key=lambda job: isinstance(job, _Save)):
            if is_save:
                self._save_all([job for job in run if isinstance(job, _Save)])
                continue
            for job in run:
                match job:
                    case Load():
                        self._load(job)
                    case _Touch():
                        self._touch_all(job)
                    case _Delete(tenant=tenant, done=done):
                        for tier in self._tiers:
                            tier.delete_tenant(tenant)
                        done()
                    case None:
                        return False
        return True

    def _save_all(self, saves: list[_Save]) -> None:
        with self._starting:
            live = [save for save in saves if not save.is_cancelled]
            for save in live:
                save.is_started = True
        try:
            new = [save for save in live if not self._adopt(save)]
            if new:
                self._export(new)
        except Exception:  # the executor has failed, and the engine will say so
            self.stats.failures += len(live)
        self._done.put(live)

    def _adopt(self, save: _Save) -> bool:
        """Whether the last tier has the node already. The node goes by the number of its entry."""
        node, parent_uid = save.node, _uid_of_parent(save.node)
        for tier in self._tiers:
            header = tier.header(node.key)
            if header is not None and header.is_block(
                root_key=node.root_key, parent_uid=parent_uid, token_ids=node.token_ids
            ):
                node.uid = header.uid
                return self._tiers[-1].may_have(node.key)
        return False

    def _touch_all(self, touch: _Touch) -> None:
        """Count entries as used, parents last, so that they outlive their children."""
        for node in reversed(touch.nodes):
            has_entry = [tier.touch(node.key) for tier in self._tiers]
            if not has_entry[-1]:
                touch.gone.append(node)
        touch.gone.reverse()
        self._done.put(touch)

    def _export(self, saves: list[_Save]) -> None:
        exported: list[list[bytes]] = [[] for _ in saves]
        for group in range(len(self._cache.pools)):
            holders = [index for index, s in enumerate(saves) if s.blocks[group] != NO_BLOCK]
            blocks = [saves[index].blocks[group] for index in holders]
            data = self._io.export_blocks(group, blocks) if blocks else b""
            size = len(data) // max(1, len(blocks))
            parts = {index: data[n * size : (n + 1) * size] for n, index in enumerate(holders)}
            for index in range(len(saves)):
                exported[index].append(parts.get(index, b""))
        for save, parts_of in zip(saves, exported, strict=True):
            node, kv = save.node, b"".join(parts_of)
            node.uid = node.uid or os.urandom(16)
            header = EntryHeader(
                key=node.key,
                root_key=node.root_key,
                uid=node.uid,
                parent_uid=_uid_of_parent(node),
                tenant=node.tenant,
                token_ids=node.token_ids,
                sizes=tuple(map(len, parts_of)),
                kv_digest=digest(kv),
            )
            for tier in self._tiers:
                tier.put(Entry(header, kv))
            self.stats.saved_blocks += 1

    def _load(self, load: Load) -> None:
        started_s = time.perf_counter()
        try:
            while len(load.headers) < len(load.keys):
                entries = self._entries(load, first=len(load.headers))
                if not entries:
                    break
                self._import(load, entries)
        except Exception:  # the executor has failed, and the engine will say so
            self.stats.failures += 1
        if load.headers:
            block_s = (time.perf_counter() - started_s) / len(load.headers)
            mean = self._block_s
            self._block_s = block_s if mean is None else mean + _SMOOTHING * (block_s - mean)
        self._done.put(load)

    def _entries(self, load: Load, *, first: int) -> list[Entry]:
        """The next entries of a load, each verified to be its tokens after the one before it."""
        entries: list[Entry] = []
        if load.headers:
            parent_uid = load.headers[-1].uid
        else:
            parent_uid = load.match.nodes[-1].uid if load.match.nodes else load.root_key
        for number in range(first, min(first + _BATCH, len(load.keys))):
            entry = self._entry(load, number, parent_uid)
            if entry is None:
                break
            entries.append(entry)
            parent_uid = entry.header.uid
        return entries

    def _entry(self, load: Load, number: int, parent_uid: bytes) -> Entry | None:
        """One entry, from the first tier that has it; the faster ones get it as well."""
        for level, tier in enumerate(self._tiers):
            entry = tier.get(load.keys[number])
            if entry is not None and entry.header.is_block(
                root_key=load.root_key, parent_uid=parent_uid, token_ids=load.token_ids[number]
            ):
                for faster in self._tiers[:level]:
                    faster.put(entry)
                return entry
        return None

    def _import(self, load: Load, entries: list[Entry]) -> None:
        first = len(load.headers)
        for group, table in enumerate(load.tables):
            wanted = [
                (table[first + number], entry)
                for number, entry in enumerate(entries)
                if table[first + number] != NO_BLOCK
            ]
            if wanted:
                data = b"".join(entry.of_group(group) for _, entry in wanted)
                self._io.import_blocks(group, [block for block, _ in wanted], data)
        load.headers += [entry.header for entry in entries]


def _uid_of_parent(node: Node) -> bytes:
    """The number of the parent's entry; one that was not saved is given a number now."""
    parent = node.parent
    if parent is None:
        return node.root_key
    parent.uid = parent.uid or os.urandom(16)
    return parent.uid
