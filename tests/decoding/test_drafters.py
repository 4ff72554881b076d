"""What drafters propose."""

import math
import random
import sys

import pytest
from tests.decoding.made_up_steps import MadeUpSeconds

from ridgeline.core.protocols import Draft, TokenDraw
from ridgeline.core.result import TokenLogprobs
from ridgeline.decoding.drafters import (
    AdaptiveDrafter,
    FirstOf,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    RecyclingDrafter,
    SuffixDrafter,
)
from ridgeline.decoding.drafters.hash_chains import MAX_CANDIDATES, MAX_MATCH, HashChains


def longest_match(tokens, end):
    """By brute force: of the latest places with the last two tokens, the longest match."""
    last = len(tokens) - (end is tokens)  # a text's own end is no earlier place
    places = [i for i in range(1, last) if tokens[i - 1 : i + 1] == end[-2:]]
    best = (0, 0)
    for place in places[::-1][:MAX_CANDIDATES]:
        length = 0
        while length < min(MAX_MATCH, place + 1, len(end)) and (
            tokens[place - length] == end[-1 - length]
        ):
            length += 1
        if length > best[0] and place + 1 < len(tokens):
            best = (length, place + 1)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_matches_are_those_of_brute_force(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice([2, 5, 30])) for _ in range(120)]
    chains = HashChains()
    for count in range(0, 120, rng.randint(1, 5)):
        chains.extend(tokens[len(chains) : count])
        known = tokens[:count]
        if count >= 3:
            expected = longest_match(known, known)
            assert tuple(chains.find_own_end()) == expected
        other = [rng.randrange(3) for _ in range(6)]
        assert tuple(chains.find(other)) == longest_match(known, other)


def test_a_repeating_text_goes_on():
    drafter = NgramDrafter()
    drafter.start(0, [9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert drafter.propose(0, 7).token_ids == (3, 1, 2, 3, 1, 2, 3)
    drafter.extend(0, [7])
    assert drafter.propose(0, 7) == Draft()


def test_outputs_serve_others_of_their_namespace_only():
    drafter = SuffixDrafter()
    drafter.start(0, [5], "a")
    drafter.extend(0, [1, 2, 3, 4])
    drafter.start(1, [8, 1, 2], "a")
    drafter.start(2, [8, 1, 2], "b")
    drafter.start(3, [8, 1, 2], None)
    assert drafter.propose(1, 3) == Draft()
    drafter.finish(0)
    assert drafter.propose(1, 3).token_ids == (3, 4)  # not beyond the end of that output
    assert drafter.propose(2, 3) == drafter.propose(3, 3) == Draft()


@pytest.mark.parametrize(
    "make", [NgramDrafter, SuffixDrafter, lambda: FirstOf([NgramDrafter(), SuffixDrafter()])]
)
def test_what_the_caller_expects_is_proposed_for_as_long_as_it_comes(make):
    drafter = make()
    drafter.start(0, [9, 1, 2], "a")
    drafter.expect(0, [9, 1, 2, 5, 6, 7, 8])
    assert drafter.propose(0, 3).token_ids == (5, 6, 7)
    drafter.extend(0, [5, 6])
    assert drafter.propose(0, 9).token_ids == (7, 8)  # and not beyond its end
    drafter.extend(0, [3, 4])
    assert drafter.propose(0, 3) == Draft()  # another output than was expected
    drafter.extend(0, [6, 7])
    assert drafter.propose(0, 3).token_ids == (8,)  # found again
    drafter.finish(0)
    drafter.start(0, [9, 1, 2], "b")
    assert drafter.propose(0, 3) == Draft()


@pytest.mark.parametrize("drafter", [NgramDrafter(is_tree=True), SuffixDrafter(is_tree=True)])
def test_trees_have_what_the_caller_expects(drafter):
    drafter.start(0, [1, 2, 3, 1, 2], "a")
    drafter.expect(0, [3, 1, 2, 5, 6])
    assert {3, 5} <= set(drafter.propose(0, 8).token_ids)


def test_what_is_drawn_ahead_is_proposed_once_it_may_follow():
    """Three tokens an n-gram, one column: beside drafts the window takes one, after the last token.

    The n-grams 7 7 8 and 1 8 9 are made ahead, 7 1 7 is said.
    """
    chain, tree = LookaheadDrafter(4), LookaheadDrafter(5, is_tree=True)
    for drafter in (chain, tree):
        drafter.start(0, [7])
        first = drafter.propose(0, 4)
        assert (first.token_ids, first.parents) == ((7,), (-1,))
        drafter.see_drawn(0, first, [1, 8])
        drafter.extend(0, [1])
        second = drafter.propose(0, 4)
        assert (second.token_ids, second.parents) == ((8,), (-1,))
        drafter.see_drawn(0, second, [7, 9])
        drafter.extend(0, [7])
        third = drafter.propose(0, 1)
        assert third.token_ids == (9,)  # of a window for which alone there is room
        drafter.see_drawn(0, third, [1, -1])  # a grammar cut it off: it stays what it was
        drafter.extend(0, [1])
    last = chain.propose(0, 4)
    assert (last.token_ids, last.parents) == ((7, 1, 9), (-1, 0, -1))
    last = tree.propose(0, 5)
    assert (last.token_ids, last.parents) == ((7, 1, 8, 9, 9), (-1, 0, -1, 2, -1))


def test_an_n_gram_counts_from_when_it_was_said_or_made():
    drafter = LookaheadDrafter(4)
    drafter.start(0, [1, 2, 3, 1])
    draft = drafter.propose(0, 4)
    assert (draft.token_ids, draft.parents) == ((2, 3, 1), (-1, 0, -1))
    drafter.see_drawn(0, draft, [1, 0, 0, 8])  # 8 comes after 1 1: later than 2 3 came after 1
    drafter.extend(0, [1])
    assert drafter.propose(0, 4).token_ids[:2] == (1, 8)


@pytest.mark.parametrize("seed", range(20))
def test_a_window_is_a_tree_that_fits(seed):
    rng = random.Random(seed)
    drafter = LookaheadDrafter(rng.randint(1, 32), is_tree=bool(seed % 2))
    text = [rng.randrange(6) for _ in range(rng.randint(1, 30))]
    drafter.start(0, text)
    for _ in range(60):
        most = rng.randint(0, 40)
        draft = drafter.propose(0, most)
        assert len(draft.token_ids) == len(draft.parents) <= most
        assert all(parent < place for place, parent in enumerate(draft.parents))
        assert len({*zip(draft.parents, draft.token_ids, strict=True)}) == len(draft.token_ids)
        drafter.see_drawn(0, draft, [rng.randrange(-1, 6) for _ in range(1 + len(draft.token_ids))])
        drafter.extend(0, [rng.randrange(6) for _ in range(rng.randint(0, 3))])
    drafter.finish(0)


@pytest.mark.parametrize(("most", "n"), [(1, 3), (6, 3), (11, 3), (12, 4), (16, 4), (33, 4)])
def test_a_window_has_as_many_columns_as_half_of_the_drafts_hold(most, n):
    """A column takes a token for each row, of which there are n - 1; the first lacks one."""
    drafter = LookaheadDrafter(most)
    drafter.start(0, list(range(100)))
    window = len(drafter.propose(0, most).token_ids)
    if most > 2:
        assert window <= most // 2 < window + n - 1
    assert (window + 1) % (n - 1) == 0


def test_the_memory_of_outputs_is_bounded():
    drafter, rng = SuffixDrafter(max_tokens=1000), random.Random(0)
    drafter.start(0, [], "one that says little")
    drafter.extend(0, [1, 2])  # after which nothing was said
    drafter.finish(0)
    assert drafter.num_remembered == 0
    for number in range(300):
        drafter.start(0, [], f"tenant {number % 7}")
        drafter.extend(0, [rng.randrange(50) for _ in range(rng.randrange(80))])
        drafter.finish(0)
        assert drafter.num_remembered <= 1000
    drafter.start(0, [], "one that says much")
    drafter.extend(0, list(range(5000)))
    drafter.finish(0)
    assert drafter.num_remembered <= 1000
    drafter.start(0, [4990, 4991], "one that says much")
    assert drafter.propose(0, 2).token_ids == (4992, 4993)


def test_a_deleted_tenants_outputs_serve_nobody():
    lookup, predictor = SuffixDrafter(), MadeUpSeconds(token_s=1.0, draft_s=1.0)
    drafter = AdaptiveDrafter(FirstOf([lookup]), predictor, max_tokens=4, has_model=False)
    for tenant, output in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        drafter.start(0, [9], "shared", tenant=tenant)
        drafter.extend(0, output)
        drafter.finish(0)
    drafter.start(1, [9], "shared", tenant="a")
    drafter.extend(1, [7, 7, 8])  # before the deletion; what follows it is remembered
    drafter.delete_tenant("a")
    drafter.delete_tenant("nobody")
    drafter.extend(1, [11, 12, 13])
    drafter.finish(1)
    assert lookup.num_remembered == 2 * (3 + 1)
    for end, following in (([1, 2], ()), ([4, 5], (6,)), ([7, 7], ()), ([11, 12], (13,))):
        drafter.start(0, end, "shared")
        assert lookup.propose(0, 3).token_ids == following, end
        drafter.finish(0)
    drafter.delete_tenant("b")
    assert lookup.num_remembered == 3 + 1


def test_the_first_proposal_is_taken():
    drafter = FirstOf([NgramDrafter(), ModelDrafter()])
    drafter.start(0, [1, 2, 3, 1, 2])
    drafter.start(1, [1, 2])
    assert drafter.propose(0, 1).token_ids == (3,)
    assert drafter.propose(1, 4).num_model_tokens == 4


def likely(token, *others):
    """What was likely in a place, and which token came."""
    logprobs = [math.log(0.56 / 2**rank) for rank in range(1 + len(others))]
    top = tuple(zip((token, *others), logprobs, strict=True))
    return TokenLogprobs(token_id=token, logprob=logprobs[0], rank=1, top=top)


def recycling(namespace="a", **settings):
    """A drafter that has seen, after 1, 2 or 3 or 4, and after 2, 5 or 6."""
    drafter = RecyclingDrafter(**settings)
    drafter.start(0, [9, 1], namespace, tenant="t")
    drafter.see(0, [likely(2, 3, 4), likely(5, 6)])
    drafter.extend(0, [2, 5])
    return drafter


def test_what_was_likely_is_likely_again():
    drafter = recycling()
    drafter.extend(0, [1])
    assert drafter.propose(0, 4) == Draft(token_ids=(2, 5))
    tree = recycling(is_tree=True)
    tree.extend(0, [1])
    assert tree.propose(0, 4) == Draft(token_ids=(2, 5, 3, 6), parents=(-1, 0, -1, 0))
    tree.see(0, [likely(7)])  # the latest counts
    tree.extend(0, [7, 1])
    assert tree.propose(0, 4).token_ids == (7,)


def test_what_was_likely_for_one_namespace_is_not_for_another():
    drafter = recycling()
    for slot, namespace in enumerate(("a", "b", None), start=1):
        drafter.start(slot, [8, 1], namespace)
    assert [drafter.propose(slot, 2).token_ids for slot in (1, 2, 3)] == [(2, 5), (), ()]
    drafter.finish(0)
    assert drafter.propose(1, 2).token_ids == (2, 5)
    drafter.delete_tenant("nobody")
    assert drafter.propose(1, 2).token_ids == (2, 5)
    drafter.delete_tenant("t")
    assert drafter.propose(1, 2) == Draft()


def test_the_memory_of_likely_tokens_is_bounded():
    drafter = RecyclingDrafter(max_tokens=50)
    for number in range(40):
        drafter.start(0, [1], f"namespace {number % 5}")
        for token in range(number, number + 30):
            drafter.see(0, [likely(token)])
            drafter.extend(0, [token])
        assert drafter.num_remembered <= 50
        assert drafter.propose(0, 1).token_ids == ()
        drafter.finish(0)
    assert drafter.num_remembered > 0


def test_the_namespace_used_longest_ago_is_forgotten_first_and_of_one_alone_the_oldest_token():
    drafter = RecyclingDrafter(max_tokens=3)
    for slot, namespace in enumerate(("old", "new")):
        drafter.start(slot, [1], namespace)
        drafter.see(slot, [likely(2), likely(3)])
    assert (drafter.num_remembered, drafter.propose(0, 2).token_ids) == (2, ())
    assert drafter.propose(1, 2).token_ids == (2, 3)
    drafter.extend(1, [2, 3])
    drafter.see(1, [likely(4), likely(1)])
    assert drafter.num_remembered == 3
    assert drafter.propose(1, 4).token_ids == (4, 1)


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter, RecyclingDrafter])
def test_nothing_is_held_of_a_sequence_that_ended(make):
    drafter, draw = make(is_tree=True), TokenDraw(seed=1)
    drafter.start(0, [1, 2], draw=draw)
    before = sys.getrefcount(draw)
    drafter.finish(0)
    assert sys.getrefcount(draw) == before - 1
