"""What the tree of cached prefixes holds, by itself."""

import pytest

from ridgeline.core.context_ranks import RUN_TOKENS
from ridgeline.kvcache import PrefixCache
from ridgeline.kvcache.block_pool import NO_BLOCK

ROOT = b"root"


def make(num_blocks=(8, 4), windows=(None,), **settings):
    return PrefixCache(num_blocks, windows, 2, **settings)


def insert(cache, token_ids, *, parent=None, tenant=""):
    """Nodes of two tokens each after ``parent``, whose blocks nobody holds."""
    nodes = []
    for start in range(0, len(token_ids), 2):
        blocks = [pool.allocate(1)[0] for pool in cache.pools[: len(cache.windows)]]
        parent = cache.insert(ROOT, parent, token_ids[start : start + 2], blocks, tenant=tenant)
        nodes.append(parent)
        for pool, block in zip(cache.pools, blocks, strict=False):
            pool.release([block])
    return nodes


def found(cache, token_ids):
    return len(cache.match(ROOT, (*token_ids, 0)).nodes)


def test_a_node_has_one_checkpoint_and_may_have_another_after_it():
    cache = make()
    first, last = insert(cache, (1, 2, 3, 4))
    one, other = cache.pools[1].allocate(2)
    assert found(cache, (1, 2, 3, 4)) == 0  # KV without a state is no hit
    assert cache.add_state(last, one)
    assert not cache.add_state(last, other)
    assert last.blocks[1] == one and found(cache, (1, 2, 3, 4)) == 2
    cache.drop_state(last)
    cache.drop_state(first)  # it has none
    assert found(cache, (1, 2, 3, 4)) == 0
    assert cache.add_state(last, other)
    assert last.blocks[1] == other
    cache.check_integrity()


def test_what_the_tree_has_lost_gets_no_checkpoint():
    cache = make()
    (node,) = insert(cache, (1, 2))
    (block,) = cache.pools[1].allocate(1)
    cache.delete_tenant("")
    assert not cache.add_state(node, block)
    (again,) = insert(cache, (1, 2))  # another node has its place
    assert not cache.add_state(node, block)
    assert node.blocks == [NO_BLOCK, NO_BLOCK]
    assert cache.add_state(again, block)
    cache.check_integrity()


def test_a_tenants_prefixes_are_forgotten_and_no_others():
    cache = make(num_blocks=(8,))
    (mine,) = insert(cache, (1, 2), tenant="me")
    insert(cache, (3, 4), parent=mine, tenant="you")
    insert(cache, (5, 6), tenant="you")
    cache.delete_tenant("me")
    assert found(cache, (5, 6)) == 1
    assert found(cache, (1, 2)) == found(cache, (1, 2, 3, 4)) == 0
    (again,) = insert(cache, (1, 2), tenant="you")
    assert again is mine  # its child held it
    assert found(cache, (1, 2, 3, 4)) == 2
    cache.check_integrity()


def test_what_was_evicted_comes_back_under_its_child():
    cache = make(num_blocks=(3,))
    first, last = insert(cache, (1, 2, 3, 4))
    cache.pools[0].release(cache.pools[0].allocate(3))
    assert cache.stats.evicted_blocks == 2 and found(cache, (1, 2)) == 0
    insert(cache, (5, 6), parent=last)
    cache.check_integrity()
    assert first.num_children == last.num_children == 1
    assert insert(cache, (1, 2)) == [first]


def test_what_was_evicted_comes_back_under_another_of_its_tokens():
    cache = make(num_blocks=(4,))
    first, last = insert(cache, (1, 2, 3, 4))
    cache.pools[0].release(cache.pools[0].allocate(4))
    (again,) = insert(cache, (1, 2))
    (child,) = insert(cache, (5, 6), parent=last)
    assert again is not first and (child.parent, last.parent) == (last, again)
    assert again.num_children == 1 and insert(cache, (3, 4), parent=first) == [last]
    assert found(cache, (1, 2, 3, 4, 5, 6)) == 3
    cache.check_integrity()


def test_what_nobody_used_for_its_time_to_live_is_forgotten():
    cache = make(num_blocks=(8,), ttl_s=10.0)
    cache.tick(100.0)
    insert(cache, (1, 2))
    cache.tick(105.0)
    insert(cache, (3, 4))
    for now_s, expected in ((110.0, [1, 1]), (111.0, [0, 1]), (116.0, [0, 0])):
        cache.tick(now_s)
        assert [found(cache, tokens) for tokens in ((1, 2), (3, 4))] == expected


@pytest.mark.parametrize(
    ("stored", "differs", "num_matching"),
    [((1, 2, 3, 4), None, 4), ((1, 2, 3, 9), (4, 9), 3), ((7, 8), (1, 7), 0)],
)
def test_a_report_says_where_a_prompt_parts_from_what_is_cached(stored, differs, num_matching):
    cache = make(num_blocks=(8,))
    insert(cache, stored)
    report = cache.explain(ROOT, (1, 2, 3, 4, 0))
    assert report.num_cached == num_matching // 2 * 2
    assert (report.num_matching, report.num_evicted) == (num_matching, 0)
    assert (report.token_id, report.cached_token_id) == (differs or (None, None))
    assert cache.explain(b"other", (1, 2, 3, 4, 0)).num_matching == 0


@pytest.mark.parametrize("block_tokens", [RUN_TOKENS // 2, RUN_TOKENS])
def test_ranks_have_runs_of_so_many_tokens(block_tokens):
    (pool,) = PrefixCache((16,), (None,), block_tokens, context_ranks=2).pools
    run = RUN_TOKENS // block_tokens
    ranks = [block // 8 for block in pool.allocate(8)]
    assert [rank != ranks[0] for rank in ranks] == [n // run % 2 == 1 for n in range(8)]


@pytest.mark.parametrize(("state_tokens", "expected"), [(1, 4), (4, 4), (11, 8), (12, 12)])
def test_checkpoints_are_whole_blocks_apart(state_tokens, expected):
    assert PrefixCache((8, 8), (None,), 4, state_tokens=state_tokens).state_tokens == expected
