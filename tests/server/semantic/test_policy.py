"""Thresholds of entries: few wrong answers, whatever the distances of paraphrases and opposites."""

import tracemalloc

import numpy as np
import pytest

from ridgeline.core.request import CompletionChunk
from ridgeline.server.semantic.cache import MAX_ANSWER_BYTES, SemanticCache
from ridgeline.server.semantic.policy import EntryThreshold, binomial_interval

SCOPE = ("tenant", b"")


def unit(vector):
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def planted(draw, *, num_questions, rounds, width=32):
    """Questions, each with an opposite at a distance of its own, that come again and again in
    other words, which scatter as far as is the question's way."""
    base = [unit(draw.normal(size=width)) for _ in range(num_questions)]
    opposite = [unit(b + draw.uniform(0.2, 0.5) * unit(draw.normal(size=width))) for b in base]
    scatter = draw.uniform(0.05, 0.3, size=num_questions)
    for number in draw.integers(num_questions, size=rounds):
        is_opposite = bool(draw.random() < 0.3)
        center = (opposite if is_opposite else base)[number]
        noise = scatter[number] * unit(draw.normal(size=width))
        yield unit(center + noise), f"{number} {is_opposite}"


def chunk(text):
    return CompletionChunk(request_id=0, index=0, text=text, token_ids=())


def played(cache, stream):
    """The hits and the wrong ones among them."""
    hits = wrong = 0
    for vector, text in stream:
        found = cache.nearest(SCOPE, vector)
        is_right = found.entry is not None and found.entry.answer.text == text
        if not found.is_hit:
            cache.learn(SCOPE, found, chunk(text), is_right=is_right)
            continue
        hits, wrong = hits + 1, wrong + (not is_right)
        if cache.wants_audit():
            cache.audited(found, is_right=is_right)
    return hits, wrong


@pytest.mark.parametrize("max_error", [0.02, 0.05])
def test_no_more_than_the_bound_is_wrong(max_error):
    cache = SemanticCache(max_error=max_error, max_entries=1000, audit=0.125)
    stream = planted(np.random.default_rng(1), num_questions=8, rounds=2000)
    hits, wrong = played(cache, stream)
    assert hits > 300
    assert wrong / hits <= max_error
    assert cache.is_on
    assert cache.num_audits == hits // 8


def test_what_was_wrong_at_a_similarity_is_not_given_there():
    threshold = EntryThreshold()
    assert threshold.chance_right(1.0) < 0.9  # nothing is known
    for similarity in np.linspace(0.9, 0.99, 12):
        threshold.observe(float(similarity), True)
        threshold.observe(float(similarity) - 0.2, False)
    assert threshold.chance_right(0.97) > 0.97
    assert threshold.chance_right(0.75) < 0.2
    for _ in range(12):
        threshold.observe(0.99, False)
    assert threshold.chance_right(0.99) < 0.8


def test_an_opposite_that_is_as_near_is_learnt_whatever_the_threshold():
    """One question in eight is another one, and as near as any: never is the bound kept."""
    draw, threshold = np.random.default_rng(3), EntryThreshold()
    for _ in range(400):
        threshold.observe(float(draw.uniform(0.98, 1.0)), bool(draw.random() > 0.125))
    assert 0.8 < threshold.chance_right(0.99) < 0.93
    assert 0.8 < threshold.chance_right(1.0) < 0.93


def test_audits_that_prove_too_many_wrong_turn_it_off():
    cache = SemanticCache(max_error=0.02, max_entries=10, audit=1.0)
    vector = unit(np.ones(4))
    cache.learn(SCOPE, cache.nearest(SCOPE, vector), chunk("a"), is_right=False)
    for _ in range(40):
        cache.learn(SCOPE, cache.nearest(SCOPE, vector), chunk("a"), is_right=True)
    found = cache.nearest(SCOPE, vector)
    assert found.is_hit
    for _ in range(5):
        cache.audited(found, is_right=True)
    assert cache.is_on
    for _ in range(4):
        cache.audited(found, is_right=False)
    assert cache.wrong_interval[0] > 0.02
    assert not cache.is_on
    assert not cache.nearest(SCOPE, vector).is_hit


def test_the_interval_is_that_of_clopper_and_pearson():
    """Closed forms: of none, of all, and of one of two."""
    assert binomial_interval(0, 0) == (0.0, 1.0)
    assert binomial_interval(0, 10) == pytest.approx((0.0, 1 - 0.025**0.1), abs=1e-9)
    assert binomial_interval(10, 10) == pytest.approx((0.025**0.1, 1.0), abs=1e-9)
    assert binomial_interval(1, 2) == pytest.approx((1 - 0.975**0.5, 0.975**0.5), abs=1e-9)


def test_scopes_and_entries_are_bounded_and_apart():
    draw = np.random.default_rng(0)
    cache = SemanticCache(max_error=0.5, max_entries=20, audit=0.0)
    vectors = [unit(draw.normal(size=8)) for _ in range(50)]
    for number, vector in enumerate(vectors):
        scope = (f"tenant {number % 2}", b"x")
        cache.learn(scope, cache.nearest(scope, vector), chunk(str(number)), is_right=False)
        assert cache.num_entries <= 20
    own = {tenant: (f"tenant {tenant}", b"x") for tenant in (0, 1)}
    kept = {
        cache.nearest(own[number % 2], vectors[number]).entry.answer.text for number in range(50)
    }
    assert len(kept) == 20
    found = cache.nearest(own[1], vectors[49])
    assert found.entry.answer.text == "49"
    assert found.similarity == pytest.approx(1.0, abs=1e-5)
    assert cache.nearest(own[0], vectors[49]).entry.answer.text != "49"
    assert cache.nearest(("tenant 1", b"y"), vectors[49]).entry is None
    assert not cache.delete("tenant 0", found.entry.id)
    assert cache.delete("tenant 1", found.entry.id)
    assert cache.delete_tenant("tenant 0") + cache.delete_tenant("tenant 1") == 19
    assert cache.num_entries == 0


def test_one_tenant_drives_out_its_own_entries_alone_and_long_answers_are_not_kept():
    draw = np.random.default_rng(0)
    cache = SemanticCache(max_error=0.5, max_entries=10, audit=0.0)
    few, many = ("few", b""), ("many", b"")
    mine = unit(draw.normal(size=8))
    cache.learn(few, cache.nearest(few, mine), chunk("mine"), is_right=False)
    for number in range(30):
        found = cache.nearest(many, unit(draw.normal(size=8)))
        cache.learn(many, found, chunk(str(number)), is_right=False)
    assert cache.nearest(few, mine).entry.answer.text == "mine"
    assert cache.num_entries == 10
    cache.delete_tenant("many")
    long = unit(draw.normal(size=8))
    cache.learn(many, cache.nearest(many, long), chunk("x" * MAX_ANSWER_BYTES), is_right=False)
    assert cache.num_entries == 2
    cache.learn(few, cache.nearest(few, long), chunk("é" * MAX_ANSWER_BYTES), is_right=False)
    assert cache.num_entries == 2


def test_questions_that_are_alone_in_their_scope_take_little_more_than_their_vectors():
    vector = np.ones(4096, dtype=np.float32)
    cache = SemanticCache(max_error=0.02, max_entries=100, audit=0.0)
    tracemalloc.start()
    try:
        for number in range(50):
            scope = ("tenant", b"%d" % number)
            cache.learn(scope, cache.nearest(scope, vector), chunk("a"), is_right=False)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes / 50 < 2.5 * vector.nbytes
