"""Whom the target's own first layers draft for."""

from tests.scheduler.test_scheduler import request

from ridgeline.core.plan import ModelRole, earlier_pass
from ridgeline.core.result import SegmentResult
from ridgeline.kvcache import KVCacheManager, PrefixCache
from ridgeline.scheduler import EarlyExit, Sequence


def new_sequence(slot, num_computed):
    """Of six tokens."""
    tokens = list(range(6))
    kv = KVCacheManager(PrefixCache([8], [None], 4), max_length=64).new_sequence(
        None, max_length=64
    )
    kv.prepare_write(0, num_computed)
    kv.advance(num_computed, tokens)
    return Sequence(
        request=request(slot, tokens),
        sample_index=0,
        token_ids=tokens,
        kv=kv,
        max_length=64,
        lane=(0, ""),
        slot=slot,
    )


def propose(exit_, sequence, num_tokens=3, *, is_tree=False):
    return exit_.propose(sequence, num_tokens, is_tree=is_tree, copies=[])


def test_it_drafts_for_those_who_lack_the_last_tokens_kv_alone():
    exit_, ready = EarlyExit(), [new_sequence(slot, 5) for slot in range(3)]
    assert [propose(exit_, new_sequence(9, count)) for count in (2, 4, 6)] == [0, 0, 0]
    assert propose(exit_, ready[0]) == propose(exit_, ready[1]) == 3
    assert propose(exit_, ready[2], 4, is_tree=True) == 4
    passes, references = exit_.passes()
    assert [(p.role, p.num_steps, p.num_nodes) for p in passes] == [
        (ModelRole.DRAFT, 3, 0),
        (ModelRole.DRAFT, 4, 4),
    ]
    for slot, segment in enumerate(segment for p in passes for segment in p.segments):
        assert (segment.slot, segment.start, segment.stop) == (slot, 5, 6)
        assert segment.token_ids == (5,) and segment.outputs.sample
    starts = (0, 3, 6, 10)
    assert references == {
        slot: tuple(map(earlier_pass, range(starts[slot], starts[slot + 1]))) for slot in range(3)
    }
    exit_.begin_step(is_resting=False)
    assert exit_.passes() == ((), {})


def test_whom_it_had_no_token_for_it_drafts_for_again_only_after_a_preemption():
    exit_, sequence = EarlyExit(), new_sequence(0, 5)
    exit_.verified(sequence, SegmentResult(token_ids=(7,)), 0)
    assert propose(exit_, sequence) == 3
    exit_.verified(sequence, SegmentResult(), 0)
    assert propose(exit_, sequence) == 0 and propose(exit_, new_sequence(1, 5)) == 3
    exit_.finish(sequence)
    exit_.start(sequence)
    assert propose(exit_, sequence) == 3
