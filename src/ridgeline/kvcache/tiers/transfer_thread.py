"""The thread between the executor's blocks and the tiers, and the jobs that it is given."""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf

from ridgeline.kvcache.block_pool import NO_BLOCK
from ridgeline.kvcache.prefix_cache import Match, Node
from ridgeline.kvcache.tiers.coming import ComingEntries
from ridgeline.kvcache.tiers.entry import Entry, EntryHeader, block_uid, digest
from ridgeline.kvcache.tiers.tier import BlockIO, Tier

_BATCH = 32  # blocks that are exported or imported at once, between two steps
_SMOOTHING = 0.2
_EXPIRE_EVERY_S = 1.0  # while there are no jobs
_LOOK_S = 1.25  # what a look takes at the most once it has begun
_FORGET_S = 30.0  # a tier that was too slow is tried again


@dataclass(slots=True)
class TransferStats:
    """Blocks since the start. ``skipped``: not saved, for want of blocks or too many under way."""

    saved_blocks: int = 0
    skipped_blocks: int = 0
    loaded_blocks: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class Save:
    """A node of the prefix cache, whose blocks are held until it is written or given up."""

    node: Node
    blocks: list[int]
    is_cancelled: bool = False
    is_started: bool = False


@dataclass(slots=True, eq=False)
class Touch:
    """Nodes that were found in the pool, parents first; ``gone`` are those without an entry."""

    nodes: list[Node]
    gone: list[Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Look:
    """Keys of which tiers are to find out whether they have them.

    It may come behind what a slow tier is given for others: after ``until_s`` nobody waits for it.
    """

    keys: list[bytes]
    until_s: float = field(default_factory=lambda: time.monotonic() + _LOOK_S)
    is_done: bool = False

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.until_s


@dataclass(frozen=True, slots=True)
class Delete:
    """What the tiers are to forget; ``done`` is called on the thread once they have.

    It is done again, after what was asked for meanwhile, for tiers that have more to forget.
    """

    tenant: str
    done: Callable[[], None]
    tiers: Sequence[Tier]


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are on their way into the prefix cache, after ``match``.

    ``tables[g][i]`` is where the KV of group g of node i goes, or `NO_BLOCK`. ``headers`` are those
    of the entries that were found, verified and imported, in order. ``deleted`` tenants are those
    whose KV must not enter the cache any more. After ``limit_s`` no more is asked for.
    """

    root_key: bytes
    match: Match
    token_ids: list[tuple[int, ...]]
    keys: list[bytes]
    tables: list[list[int]]
    headers: list[EntryHeader]
    limit_s: float = inf
    deleted: set[str] = field(default_factory=set)
    is_done: bool = False


Job = Save | Load | Look | Touch | Delete
Done = list[Save] | Load | Look | Touch


class BlockSeconds:
    """Running mean of the seconds that a block takes; 0 before the first, and long after the last,
    so that what was slow is tried again."""

    def __init__(self) -> None:
        self._mean_s, self._noted_s = 0.0, -inf

    @property
    def mean_s(self) -> float:
        return self._mean_s if time.monotonic() < self._noted_s + _FORGET_S else 0.0

    def note(self, block_s: float) -> None:
        """So long a block took."""
        mean_s = self.mean_s
        self._mean_s = mean_s + _SMOOTHING * (block_s - mean_s) if mean_s else block_s
        self._noted_s = time.monotonic()


class TransferThread:
    """Does jobs in the order in which they come. Methods without an underscore are for its owner.

    Without a thread, jobs are done when `finished` is called.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        block_io: BlockIO,
        stats: TransferStats,
        coming: ComingEntries,
        *,
        in_thread: bool,
    ) -> None:
        self.get_s = [BlockSeconds() for _ in tiers]  # out of each tier
        self.import_s = BlockSeconds()  # and into the pool
        self._tiers = tiers
        self._kept = [tier for tier in tiers if not tier.is_read_only]
        self._io = block_io
        self._stats = stats
        self._coming = coming
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # the last: an end
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
            self._thread.start()

    def put(self, job: Job) -> None:
        """Have a job done after all others."""
        self._jobs.put(job)

    def cancel(self, save: Save) -> bool:
        """Give up a save; false if it has begun."""
        with self._starting:
            save.is_cancelled = not save.is_started
        return save.is_cancelled

    def finished(self) -> Iterator[Done]:
        """What was finished since the last call."""
        if self._thread is None:
            self._work()
        while True:
            try:
                yield self._done.get_nowait()
            except queue.Empty:
                return

    def close(self, timeout_s: float) -> None:
        """Finish what was begun, for at most so long."""
        if self._thread is None:
            self._work()
        else:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._do(self._next_jobs()):
            self._expire()

    def _work(self) -> None:
        while not self._jobs.empty():
            self._do(self._next_jobs())
        self._expire()

    def _expire(self) -> None:
        for tier in self._tiers:
            with self._counted():
                tier.expire()

    def _next_jobs(self) -> list[Job | None]:
        """Some jobs, or none after a while."""
        try:
            jobs = [self._jobs.get(timeout=_EXPIRE_EVERY_S)]
        except queue.Empty:
            return []
        while len(jobs) < _BATCH and not self._jobs.empty():
            jobs.append(self._jobs.get())
        return jobs

    def _do(self, jobs: list[Job | None]) -> bool:
        """Do jobs in order, saves that follow each other at once; false at the end."""
        for is_save, run in groupby(jobs, key=lambda job: isinstance(job, Save)):
            if is_save:
                self._save_all([job for job in run if isinstance(job, Save)])
                continue
            for job in run:
                match job:
                    case Load():
                        self._load(job)
                    case Look():
                        for tier in self._tiers:
                            with self._counted():
                                tier.look([key for key in job.keys if tier.is_unsure(key)])
                        self._done.put(job)
                    case Touch():
                        with self._counted():
                            self._touch_all(job)
                        self._done.put(job)
                    case Delete():
                        self._delete(job)
                    case None if self._jobs.empty():
                        return False
                    case None:
                        self._jobs.put(None)  # after a deletion that goes on
        return True

    @contextmanager
    def _counted(self, count: int = 1) -> Iterator[None]:
        """A failure of the executor, which the engine will say, or of a tier ends no more than
        one job: somebody waits for the others."""
        try:
            yield
        except Exception:
            self._stats.failures += count

    def _delete(self, delete: Delete) -> None:
        left = []
        for tier in delete.tiers:
            is_done = True
            with self._counted():
                is_done = tier.delete_tenant(delete.tenant)
            if not is_done:
                left.append(tier)
        if left:
            self._jobs.put(replace(delete, tiers=left))
        else:
            delete.done()

    def _save_all(self, saves: list[Save]) -> None:
        with self._starting:
            live = [save for save in saves if not save.is_cancelled]
            for save in live:
                save.is_started = True
        with self._counted(len(live)):
            has = self._touched([save.node.key for save in live])
            new = [save for save in live if save.node.key not in has]
            if new:
                self._export(new)
        self._coming.discard([save.node.key for save in live])
        self._done.put(live)

    def _touch_all(self, touch: Touch) -> None:
        """Count entries as used, parents last, so that they outlive their children."""
        keys = [node.key for node in reversed(touch.nodes)]
        for tier in self._kept[:-1]:
            tier.touch_all(keys)
        has = self._touched(keys)
        touch.gone += [node for node in touch.nodes if node.key not in has]

    def _touched(self, keys: list[bytes]) -> Collection[bytes]:
        """Those of the keys that the last tier has, or that none would keep."""
        return self._kept[-1].touch_all(keys) if self._kept else keys

    def _export(self, saves: list[Save]) -> None:
        exported: list[list[bytes]] = [[] for _ in saves]
        for group in range(len(saves[0].blocks)):
            holders = [index for index, s in enumerate(saves) if s.blocks[group] != NO_BLOCK]
            blocks = [saves[index].blocks[group] for index in holders]
            data = self._io.export_blocks(group, blocks) if blocks else b""
            size = len(data) // max(1, len(blocks))
            parts = {index: data[n * size : (n + 1) * size] for n, index in enumerate(holders)}
            for index in range(len(saves)):
                exported[index].append(parts.get(index, b""))
        entries = []
        for save, parts_of in zip(saves, exported, strict=True):
            node, kv = save.node, b"".join(parts_of)
            header = EntryHeader(
                key=node.key,
                root_key=node.root_key,
                uid=_uid(node),
                tenant=node.tenant,
                token_ids=node.token_ids,
                sizes=tuple(map(len, parts_of)),
                kv_digest=digest(kv),
            )
            entries.append(Entry(header, kv))
        for tier in self._kept:
            tier.put_all(entries)
        self._stats.saved_blocks += len(entries)

    def _load(self, load: Load) -> None:
        started_s = time.perf_counter()
        with self._counted():
            while len(load.headers) < len(load.keys):
                entries = self._entries(load, first=len(load.headers))
                if not entries:
                    break
                importing_s = time.perf_counter()
                self._import(load, entries)
                now_s = time.perf_counter()
                self.import_s.note((now_s - importing_s) / len(entries))
                if now_s > started_s + load.limit_s:
                    break
        self._done.put(load)

    def _entries(self, load: Load, *, first: int) -> list[Entry]:
        """The next entries of a load, each verified to be its tokens after the one before it.

        They come from the first tier that has them; the faster ones get them as well.
        """
        keys = load.keys[first : first + _BATCH]
        found: dict[bytes, tuple[int, Entry]] = {}
        for level, tier in enumerate(self._tiers):
            missing = [key for key in keys if key not in found]
            started_s = time.perf_counter()
            got = tier.get_all(missing) if missing else {}
            if got:
                self.get_s[level].note((time.perf_counter() - started_s) / len(got))
            found |= {key: (level, entry) for key, entry in got.items()}
        if load.headers:
            uid = load.headers[-1].uid
        else:
            uid = _uid(load.match.nodes[-1]) if load.match.nodes else load.root_key
        verified: list[tuple[int, Entry]] = []
        for key, token_ids in zip(keys, load.token_ids[first:], strict=False):
            uid = block_uid(uid, token_ids)
            if key not in found or not found[key][1].header.is_block(
                root_key=load.root_key, uid=uid, token_ids=token_ids
            ):
                break
            verified.append(found[key])
        for level, tier in enumerate(self._tiers):
            if not tier.is_read_only:
                tier.put_all([entry for origin, entry in verified if origin > level])
        return [entry for _, entry in verified]

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


def _uid(node: Node) -> bytes:
    """The name of a node in the tiers; those before it are given theirs as well."""
    chain = []
    each: Node | None = node
    while each is not None and not each.uid:
        chain.append(each)
        each = each.parent
    uid = node.root_key if each is None else each.uid
    for each in reversed(chain):
        uid = each.uid = block_uid(uid, each.token_ids)
    return uid
