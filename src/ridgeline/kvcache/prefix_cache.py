"""Which prefixes' KV is in the pools, and in which blocks.

Full blocks form a tree: a node is one block of tokens after its parent's. Nodes are found by a
SHA-256 key over the parent's key and the tokens, and verified by root, parent and tokens, so a
collision is a miss, never a wrong reuse. The root's key carries what else KV depends on within one
engine: layout, adapter, tenant.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.context_ranks import RUN_TOKENS
from ridgeline.core.settings.kv import STATE_CHECKPOINT_TOKENS
from ridgeline.kvcache.block_pool import NO_BLOCK, BlockPool
from ridgeline.kvcache.reports import MissReport


def block_key(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 of the parent's key and the tokens as 32-bit integers."""
    return hashlib.sha256(parent_key + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


@dataclass(slots=True, eq=False)
class Node:
    """One full block of tokens. ``blocks[g]`` holds its KV of group g, or `NO_BLOCK`.

    A node stays while it has a block or a child. It was computed for ``tenant``. ``uid`` names it
    in the tiers (see `ridgeline.kvcache.tiers`), to which ``is_kept`` says that it was given; they
    may have evicted it since.
    """

    key: bytes
    root_key: bytes
    parent: "Node | None"
    token_ids: tuple[int, ...]
    blocks: list[int]
    num_children: int = 0
    tenant: str = ""
    uid: bytes = b""
    is_kept: bool = False


class Match(NamedTuple):
    """The longest usable prefix: its nodes, and the block of each in every group.

    ``num_nodes`` counts those that the cache has of the tokens, usable or not.
    """

    nodes: list[Node]
    tables: list[list[int]]
    num_nodes: int = 0


@dataclass(slots=True)
class CacheStats:
    """Tokens of admitted requests, those of them found, and blocks evicted, since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """Owns the pools of all groups, and the tree of what they hold.

    ``windows[g]`` is the attention window of KV group g in tokens: a prefix is usable if its blocks
    are there as far back as the next token can see. One pool more than windows is that of states:
    then the prefix's last node has to have a checkpoint, too. Sequences save one every
    ``state_tokens``, which are whole blocks.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        windows: Sequence[int | None],
        block_tokens: int,
        *,
        ttl_s: float | None = None,
        state_tokens: int = STATE_CHECKPOINT_TOKENS,
        context_ranks: int = 1,
    ) -> None:
        self._ttl_s = ttl_s
        self.has_states = len(num_blocks) > len(windows)
        self.state_tokens = max(1, state_tokens // block_tokens) * block_tokens
        self.block_tokens = block_tokens
        self.windows = tuple(windows)
        self.stats = CacheStats()
        self._nodes: dict[bytes, Node] = {}
        self._holders: list[dict[int, Node]] = [{} for _ in num_blocks]  # block -> node
        self.pools = tuple(
            BlockPool(
                count,
                on_evict=lambda block, group=group: self._evicted(group, block),  # type: ignore[misc]
                num_ranks=context_ranks,
                run_blocks=max(1, RUN_TOKENS // block_tokens),
            )
            for group, count in enumerate(num_blocks)
        )

    def tick(self, now_s: float) -> None:
        """Tell the time, and forget what nobody has used for ``ttl_s`` seconds."""
        for pool in self.pools:
            pool.now_s = now_s
            if self._ttl_s is not None:
                pool.evict_idle(before_s=now_s - self._ttl_s)

    def match(self, root_key: bytes, token_ids: Sequence[int]) -> Match:
        """The longest cached prefix that leaves at least one token to compute.

        Takes no reference: `BlockPool.share` its tables before anything is allocated.
        """
        nodes = list(self._walk(root_key, token_ids))
        count = self._usable(nodes)
        for group, pool in enumerate(self.pools):
            count = min(count, pool.num_in_turn([node.blocks[group] for node in nodes[:count]]))
        tables = []
        for group in range(len(self.pools)):
            first = self.first_visible_block(group, count * self.block_tokens)
            blocks = [node.blocks[group] for node in nodes[:count]]
            tables.append([NO_BLOCK] * min(first, count) + blocks[first:])
        return Match(nodes[:count], tables, len(nodes))

    def insert(
        self,
        root_key: bytes,
        parent: Node | None,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        *,
        tenant: str = "",
    ) -> Node | None:
        """Remember that these held blocks hold these tokens after ``parent`` (``None``: the root).

        Groups that have the node already keep the block that they have. Returns the node, or
        ``None`` if another node has the same key, after which the sequence is not cached further.
        """
        if parent is not None:
            parent = self._revive(parent)
            if parent is None:
                return None
        tokens = tuple(token_ids)
        key = block_key(root_key if parent is None else parent.key, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = Node(key, root_key, parent, tokens, [NO_BLOCK] * len(self.pools), tenant=tenant)
            self._add(node)
        elif not _is(node, root_key, parent, tokens):
            return None
        for group, block in enumerate(blocks):
            if node.blocks[group] == NO_BLOCK != block:
                node.blocks[group] = block
                self._holders[group][block] = node
                self.pools[group].cache(block)
        return node

    def add_state(self, node: Node, block: int) -> bool:
        """Cache a held block as the checkpoint at the end of a node; False if it has one, or the
        tree has lost it."""
        group = len(self.windows)
        if node.blocks[group] != NO_BLOCK or self._nodes.get(node.key) is not node:
            return False
        node.blocks[group] = block
        self._holders[group][block] = node
        self.pools[group].cache(block)
        return True

    def drop_state(self, node: Node) -> None:
        """Forget the checkpoint at the end of a node, if it has one; who holds it may use it."""
        group = len(self.windows)
        block = node.blocks[group]
        if block != NO_BLOCK:
            self.pools[group].uncache(block)
            self._forget(group, block)

    def pin(self, root_key: bytes, token_ids: Sequence[int]) -> list[list[int]]:
        """Hold what is cached of a prefix, its last block included, so that it is never evicted.

        Returns the blocks of each group, which are the caller's to release.
        """
        tables = self.match(root_key, (*token_ids, 0)).tables  # a match leaves one token over
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(table)
        return tables

    def explain(self, root_key: bytes, token_ids: Sequence[int]) -> MissReport:
        """Why a prompt is not cached further than it is; looks at every node."""
        nodes = list(self._walk(root_key, token_ids))
        size = self.block_tokens
        num_cached, start = self._usable(nodes) * size, len(nodes) * size
        rest = tuple(token_ids[start : start + size])
        last = nodes[-1] if nodes else None
        best: tuple[int, ...] = ()
        num_common = -1
        for node in self._nodes.values():
            if node.parent is last and node.root_key == root_key:
                common = _num_common(node.token_ids, rest)
                if common > num_common:
                    best, num_common = node.token_ids, common
        num_common = max(0, num_common)
        differs = num_common < min(len(rest), len(best))
        return MissReport(
            num_cached=num_cached,
            num_matching=start + num_common,
            token_id=rest[num_common] if differs else None,
            cached_token_id=best[num_common] if differs else None,
            num_evicted=start - num_cached,
        )

    def delete_tenant(self, tenant: str) -> None:
        """Forget what was computed for a tenant; who holds some of it may go on to use it."""
        for group, holders in enumerate(self._holders):
            for block in [b for b, node in holders.items() if node.tenant == tenant]:
                self.pools[group].uncache(block)
                self._forget(group, block)

    def first_visible_block(self, group: int, num_computed: int) -> int:
        """The first table entry that the token at position ``num_computed`` can see.

        Of states, that is the last of those before it.
        """
        if group == len(self.windows):
            return max(0, num_computed // self.block_tokens - 1)
        window = self.windows[group]
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_tokens

    def check_integrity(self) -> None:
        """Assert that nodes and blocks point at each other and that no node is left without use."""
        for group, holders in enumerate(self._holders):
            assert len(holders) == self.pools[group].num_cached
            for block, node in holders.items():
                assert node.blocks[group] == block
                assert self._nodes[node.key] is node
        children = [node.parent for node in self._nodes.values() if node.parent is not None]
        for node in self._nodes.values():
            assert node.num_children == sum(parent is node for parent in children)
            assert node.num_children or any(block != NO_BLOCK for block in node.blocks)

    def _walk(self, root_key: bytes, token_ids: Sequence[int]) -> Iterator[Node]:
        key, parent, size = root_key, None, self.block_tokens
        for start in range(0, len(token_ids) - size, size):
            tokens = tuple(token_ids[start : start + size])
            key = block_key(key, tokens)
            node = self._nodes.get(key)
            if node is None or not _is(node, root_key, parent, tokens):
                return
            yield node
            parent = node

    def _usable(self, nodes: Sequence[Node]) -> int:
        """The largest count for which every group has the blocks that the next token sees."""
        runs = [[0] for _ in self.pools]  # runs[g][i]: consecutive blocks that end with node i − 1
        for node in nodes:
            for group, block in enumerate(node.blocks):
                runs[group].append(0 if block == NO_BLOCK else runs[group][-1] + 1)
        for count in range(len(nodes), 0, -1):
            length = count * self.block_tokens
            if all(
                run[count] >= count - self.first_visible_block(group, length)
                for group, run in enumerate(runs)
            ):
                return count
        return 0

    def _revive(self, node: Node | None) -> Node | None:
        """The node in the tree that stands for ``node``, which may have been evicted since.

        That happens to a sequence whose own block was not cached, since another's held the same.
        ``None`` if another node has taken the key.
        """
        gone = []
        while node is not None and self._nodes.get(node.key) is not node:
            gone.append(node)
            node = node.parent
        for child in reversed(gone):
            current = self._nodes.get(child.key)
            if current is None:
                child.parent = node
                self._add(child)
                current = child
            elif not _is(current, child.root_key, node, child.token_ids):
                return None
            node = current
        return node

    def _add(self, node: Node) -> None:
        self._nodes[node.key] = node
        if node.parent is not None:
            node.parent.num_children += 1

    def _evicted(self, group: int, block: int) -> None:
        self.stats.evicted_blocks += 1
        self._forget(group, block)

    def _forget(self, group: int, block: int) -> None:
        node = self._holders[group].pop(block)
        node.blocks[group] = NO_BLOCK
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Let go of a node without block and child, and then perhaps of its parent.

        Nothing happens to a node that the tree has lost already.
        """
        while (
            node is not None
            and self._nodes.get(node.key) is node
            and not node.num_children
            and all(entry == NO_BLOCK for entry in node.blocks)
        ):
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.num_children -= 1


def _is(node: Node, root_key: bytes, parent: Node | None, token_ids: tuple[int, ...]) -> bool:
    return node.parent is parent and node.token_ids == token_ids and node.root_key == root_key


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common start of two sequences."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
