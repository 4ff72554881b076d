"""Trees of drafts: what is ranked first is what would be drawn, and the best nodes are kept."""

import itertools
import math

import numpy as np
import pytest

from ridgeline.core.protocols import GREEDY_DRAW, TokenDraw
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding import History, sample
from ridgeline.decoding.drafters.hash_chains import HashChains
from ridgeline.decoding.drafters.lookup_tree import continuations, lookup_tree
from ridgeline.decoding.trees import Children, DraftTree, likely_tokens

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.4, logit_bias={3: 2.0}),
}


@pytest.mark.parametrize("name", PARAMS)
def test_the_likeliest_token_is_what_would_be_drawn(name):
    """Of more tokens than noise is drawn for, too."""
    params, generator = PARAMS[name], np.random.default_rng(0)
    for position in range(30):
        logits = 3.0 * generator.normal(size=900).astype(np.float32)
        history = History(token_ids=list(range(position)), num_prompt_tokens=1)
        drawn = {"seed": position, "sample_index": 1}
        found = likely_tokens(logits, params, history, count=4, **drawn)
        assert found.token_ids[0] == sample(logits, params, history, **drawn)
        assert found.log_shares == sorted(found.log_shares, reverse=True)
        assert sum(map(math.exp, found.log_shares)) <= 1.0 + 1e-9
        barred = logits.copy()
        barred[found.token_ids[0]] = -np.inf
        others = likely_tokens(barred, params, history, count=3, **drawn)
        assert others.token_ids == found.token_ids[1:]


def test_no_token_is_likely_where_none_is_possible():
    history = History(token_ids=[1], num_prompt_tokens=1)
    for row in (np.full(9, -np.inf), np.full(9, np.nan)):
        found = likely_tokens(row, PARAMS["sampled"], history, seed=0, sample_index=0, count=2)
        assert found == Children([], [])


@pytest.mark.parametrize("seed", range(10))
def test_the_best_nodes_of_the_whole_tree_are_kept(seed):
    """Three children of each node, to a depth of three, by brute force."""
    generator = np.random.default_rng(seed)
    paths = {(): 0.0}
    tree, nodes = DraftTree(7), {(): -1}
    for depth in range(3):
        for path in itertools.product(range(3), repeat=depth):
            shares = np.sort(np.log(generator.dirichlet(np.ones(3))))[::-1].tolist()
            for child, share in enumerate(shares):
                paths[*path, child] = paths[path] + share
            added = tree.add(nodes[path], Children([0, 1, 2], shares))
            nodes |= {(*path, child): node for child, node in enumerate(added)}
    best = sorted((path for path in paths if path), key=lambda path: -paths[path])[:7]
    tokens, parents = tree.best()
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert found == best
    assert [tree.path(nodes[path]) for path in best] == [list(path) for path in best]


def proposed(texts, context, count, draw=GREEDY_DRAW, **settings):
    """The paths of a tree over what followed a context in some texts."""
    found = []
    for text in texts:
        chains = HashChains()
        chains.extend(text)
        found += continuations(chains, chains.ends_of(context), **settings)
    draft = lookup_tree(found, position=50, num_nodes=count, draw=draw)
    paths = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_what_followed_more_often_and_after_more_of_the_same_comes_first():
    assert proposed([[1, 2, 7, 1, 2, 8, 1, 2, 8, 9]], [1, 2], 2) == [(8,), (7,)]
    paths = proposed([[5, 1, 2, 7, 3, 1, 2, 8, 4]], [5, 1, 2], 8)
    assert paths[:2] == [(7,), (7, 3)]
    assert (8,) in paths


def test_continuations_end_with_their_text_or_repeat_it():
    texts = [[1, 2, 3, -1, 1, 2, 3, 4, -1]]
    assert set(proposed(texts, [1, 2], 9, end=-1)) == {(3,), (3, 4)}
    assert proposed([[1, 2, 3, 1, 2]], [1, 2], 5)[-1] == (3, 1, 2, 3, 1)
    assert proposed([[1, 2, 3]], [8, 9], 5) == []


def test_sampled_continuations_are_ranked_with_the_noise_of_their_place():
    """Of two that are seen as often, each is first as often; what is seen more is first more."""
    even = [[1, 2, 7, 0, 1, 2, 8, 0]]
    draws = [TokenDraw(seed=seed, temperature=1.0) for seed in range(400)]
    first = [proposed(even, [1, 2], 2, draw)[0] for draw in draws]
    assert 160 < first.count((7,)) < 240
    often = [[1, 2, 7, 0, 1, 2, 7, 0, 1, 2, 7, 0, 1, 2, 8, 0]]
    first = [proposed(often, [1, 2], 1, draw)[0] for draw in draws]
    assert first.count((7,)) == pytest.approx(300, abs=30)
