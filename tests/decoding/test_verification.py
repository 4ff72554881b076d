from ridgeline.decoding import ancestors, chain, depths, verify


def drawer(tokens):
    return lambda node: tokens[node]


def test_chain_stops_at_the_first_difference():
    target = {-1: 10, 0: 11, 1: 99, 2: 13}
    assert verify((10, 11, 12), chain(3), drawer(target)) == ((10, 11, 99), (0, 1))


def test_all_accepted_yields_one_more():
    target = {-1: 1, 0: 2, 1: 3}
    assert verify((1, 2), chain(2), drawer(target)) == ((1, 2, 3), (0, 1))


def test_nothing_accepted_yields_one():
    assert verify((5,), chain(1), drawer({-1: 4})) == ((4,), ())
    assert verify((), (), drawer({-1: 4})) == ((4,), ())


def test_tree_takes_the_matching_branch():
    #        -1 ── 0:a ── 2:c
    #         └─── 1:b ── 3:d ── 4:e
    parents, drafts = (-1, -1, 0, 1, 3), (10, 20, 11, 21, 22)
    target = {-1: 20, 1: 21, 3: 99}
    assert verify(drafts, parents, drawer(target)) == ((20, 21, 99), (1, 3))
    assert depths(parents) == (1, 1, 2, 2, 3)
    assert ancestors(parents, 4) == (1, 3, 4)
    assert ancestors(parents, -1) == ()


def test_equal_siblings_take_the_first():
    assert verify((7, 7), (-1, -1), drawer({-1: 7, 0: 8, 1: 9})) == ((7, 8), (0,))
