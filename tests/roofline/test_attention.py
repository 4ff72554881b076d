"""What attention computes, reads and exchanges, counted key by key; and exchanges by hand."""

import random
from math import ceil

import numpy as np
import pytest
from tests.tiny import CONFIG, EXPERTS, LATENT

from ridgeline.core.context_ranks import LEAST_TOKENS
from ridgeline.core.kv_compression import KVWindow
from ridgeline.core.ops import Attend, BidirectionalAttend, Head, LatentAttend, MoE
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import Outputs, Pass, Segment
from ridgeline.models import describe, lower, shard
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import batch_of, batches_of, make_batch
from ridgeline.roofline.op_cost import op_work

BATCH = make_batch([(39, 40)] * 3)


def model_of(config, **changes):
    spec = describe(config).spec
    return PricedModel(spec=spec, ops=lower(spec), **changes)


def batches():
    """Ranges of one token and of several, some with a window and sinks, in one batch."""
    rng = random.Random(3)
    for number in range(60):
        segments = []
        for slot in range(rng.randint(1, 4)):
            start, length = rng.randint(0, 40), rng.choice((1, 1, rng.randint(2, 20)))
            window = KVWindow(rng.randint(0, 4), rng.randint(1, 12)) if number % 2 else None
            segments.append(
                Segment(slot, start, start + length, (1,) * length,
                        window=window if rng.random() < 0.8 else None,
                        outputs=Outputs(sample=slot % 2 == 0))
            )  # fmt: skip
        yield segments


def keys_of(segment, window, chunked=False):
    """For each query of a segment, the positions that it sees in a layer with that window, or with
    chunks of its size."""
    for query in range(segment.start, segment.stop):
        before = set(range(query + 1))
        if chunked:
            yield {key for key in before if key // window == query // window}
        elif window is not None:
            yield {key for key in before if key > query - window}
        elif segment.window is not None:
            sinks, last = segment.window
            yield {key for key in before if key > query - last or key < sinks}
        else:
            yield before


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (7, False), (7, True)])
def test_a_batch_has_the_pairs_and_rows_that_its_queries_see(window, chunked):
    for segments in batches():
        batch = batch_of(segments)
        seen = [list(keys_of(each, window, chunked)) for each in segments]
        rows = [len(set().union(*each)) for each in seen]
        pairs = sum(len(keys) for each in seen for keys in each)
        assert batch.visible_pairs(window, chunked=chunked) == pairs
        assert batch.kv_rows(window, chunked=chunked) == sum(rows)
        lengths = [each.num_tokens for each in segments]
        assert batch.square_pairs(window, chunked=chunked) == np.dot(lengths, rows)
        loads = [ceil(3 * length / 8) for length in lengths]
        loaded = batch.loaded_rows(window, heads=3, rows=8, chunked=chunked)
        assert loaded == np.dot(loads, rows)
        assert batch.num_tokens == sum(lengths)
        assert batch.logit_rows == sum(each.outputs.sample for each in segments)


def test_passes_that_deepen_a_tree_compute_the_last_token_and_the_nodes_so_far():
    """Of 6 nodes each of two passes adds 3 of the 5 that may have children, as far as they go."""
    segments = tuple(
        Segment(slot, start, stop, (1,) * (stop - start), outputs=Outputs(sample=True))
        for slot, (start, stop) in enumerate([(0, 7), (39, 40)])
    )
    first, *later = batches_of(Pass(segments=segments, num_steps=3, num_nodes=6))
    assert first.num_tokens == 8 and first.logit_rows == 2
    for batch, nodes in zip(later, (3, 5), strict=True):
        assert batch.starts.tolist() == [6, 39]
        assert batch.stops.tolist() == [7 + nodes, 40 + nodes]
        assert batch.logit_rows == 2 * (1 + nodes)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_both_ways_computes_the_pairs_on_both_sides(window):
    op = BidirectionalAttend(
        num_heads=6, num_kv_heads=3, head_dim=8, scale=1.0, window=window, softcap=None
    )
    lengths = (1, 3, 9)
    pairs = sum(
        abs(query - key) < (window or length)
        for length in lengths
        for query in range(length)
        for key in range(length)
    )
    work = op_work(op, make_batch([(0, length) for length in lengths]), model_of(CONFIG))
    assert work.flops == 2 * 2 * pairs * 6 * 8
    assert work.activation_bytes == sum(lengths) * (6 + 6 + 3 + 3) * 8 * 2
    assert work.kv_read_bytes == work.weight_bytes == 0
    four = model_of(CONFIG, layout=ParallelLayout(tensor=2, context=2))
    assert (
        op_work(op, make_batch([(0, length) for length in lengths]), four).flops == work.flops / 4
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_computes_a_score_and_a_sum_for_each_pair(ranks):
    """Of KV its own rank reads its part, and of heads it computes them all."""
    model = model_of(CONFIG, layout=ParallelLayout(context=ranks))
    (op, _), *_ = model.attention_ops
    for segments in batches():
        work = op_work(op, batch_of(segments), model)
        seen = [list(keys_of(each, op.window)) for each in segments]
        pairs = sum(len(keys) for each in seen for keys in each)
        rows = sum(len(set().union(*each)) for each in seen)
        assert work.flops == 2 * 2 * pairs / ranks * 6 * 8
        assert work.kv_read_bytes == rows / ranks * 2 * 2 * 8 * 2


@pytest.mark.parametrize("each_by_itself", [False, True])
def test_latent_attention_takes_the_cheaper_of_its_two_forms(each_by_itself):
    """Latents are expanded to K and V of each head, or the matrix is taken into q and the output;
    the reference chooses for each segment, and computes scores that are masked."""
    model = model_of(LATENT, dense_attention=each_by_itself)
    (op, _), *_ = model.attention_ops
    assert isinstance(op, LatentAttend)
    rank, nope, rope, v = 16, 8, 4, 12

    def forms(queries, rows, pairs):
        matrix = rank * (nope + v)
        plain = rows * matrix + pairs * (nope + rope + v)
        return plain, queries * matrix + pairs * (rank + rope + rank)

    chosen = set()
    for bounds in ([(0, 30)], [(39, 40)], [(30, 40)], [(0, 3), (0, 25), (99, 100)], [(0, 1)]):
        counts = [
            (stop - start, stop, (stop - start) * stop if each_by_itself else
             sum(range(start + 1, stop + 1)))
            for start, stop in bounds
        ]  # fmt: skip
        if each_by_itself:
            multiplies = sum(min(forms(*count)) for count in counts)
        else:
            multiplies = min(forms(*map(sum, zip(*counts, strict=True))))
        plain, absorbed = forms(*counts[0])
        chosen.add(plain < absorbed)
        work = op_work(op, make_batch(bounds), model)
        assert work.flops == 2 * 6 * multiplies
        assert work.kv_read_bytes == sum(stop for _, stop in bounds) * (rank + rope) * 2
    assert chosen == {True, False}


def test_ranks_that_share_contexts_exchange_blocks_of_long_ranges_and_splits_of_short_ones():
    size, long = 16, 2 * LEAST_TOKENS
    model = model_of(CONFIG, layout=ParallelLayout(context=2), block_tokens=size)
    op = next(op for op in model.ops if isinstance(op, Attend))
    row = 2 * 2 * 8 * 2  # K and V of 2 heads of 8 in 2 bytes

    def exchanged(*bounds):
        """Bytes and messages to the other rank; this one reads its half, and writes everything."""
        work = op_work(op, make_batch(bounds), model)
        lengths = [stop - start for start, stop in bounds]
        own = sum(length if length < long else length / 2 for length in lengths)
        assert work.activation_bytes == own * 2 * 6 * 8 * 2 + 3 * work.link_bytes
        seen = sum(stop if stop - start >= long else stop / 2 for start, stop in bounds)
        assert work.kv_read_bytes == seen * row
        return work.link_bytes, work.link_messages

    # All blocks of the range, and those before it, of which the one that it begins in comes twice.
    assert exchanged((0, long)) == (long * row / 2, 1)
    blocks = ceil((21 + long) / size) + 1
    assert exchanged((21, 21 + long)) == (blocks * size * row / 2, 2)
    # A token's 6 heads for each run of 512, each a maximum, a sum and a width of 8 that becomes 16.
    assert exchanged((511, 512)) == (6 * 1 * 18 * 4 / 2, 1)
    assert exchanged((512, 513), (0, 3)) == (6 * (2 + 3) * 18 * 4 / 2, 1)
    assert exchanged((0, long), (511, 512)) == ((long * row + 6 * 18 * 4) / 2, 2)


def test_before_the_head_ranks_exchange_the_hidden_states_of_what_they_share():
    """Of each long range a rank computed a fourth, and has the rest from the others."""
    model = model_of(CONFIG, layout=ParallelLayout(context=4))
    head, long = model.ops[-1], 4 * LEAST_TOKENS
    assert isinstance(head, Head)
    hidden_bytes = model.spec.hidden_size * 2
    for bounds, shared in (([(0, long)], 1), ([(0, long), (9, 9 + long)], 2), ([(9, 10)], 0)):
        work = op_work(head, make_batch(bounds), model)
        assert work.link_bytes == shared * long * hidden_bytes * 3 / 4
        assert work.link_messages == shared


@pytest.mark.parametrize(("rank", "own"), [(0, 1), (1, 2), (2, 2)])
def test_ranks_send_what_their_experts_made_to_all_others(rank, own):
    """Of 5 experts each has so many, and a token goes to 2; all write and read what all made."""
    spec = describe(EXPERTS).spec
    model = PricedModel(spec=spec, ops=shard(spec, ParallelLayout(expert=3), rank).ops)
    plain = model_of(EXPERTS)
    op, whole = (next(op for op in each.ops if isinstance(op, MoE)) for each in (model, plain))
    work, alone = (op_work(*each) for each in ((op, BATCH, model), (whole, BATCH, plain)))
    hidden_bytes = spec.hidden_size * 2
    assert op.borders[rank + 1] - op.borders[rank] == own
    assert work.link_bytes == pytest.approx(3 * 2 * hidden_bytes * own / 5 * 2)
    assert work.link_messages == 1
    moved = work.activation_bytes - alone.activation_bytes
    assert moved == 2 * 3 * 2 * hidden_bytes
