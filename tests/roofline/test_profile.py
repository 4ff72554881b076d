"""Profiles of steps that are made up, so that every figure is known."""

import json
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.ops import MLP, Head, KVWrite, Norm, Rope
from ridgeline.core.plan import ModelRole, Outputs, Pass, Segment, StepPlan
from ridgeline.core.recorded_step import OpSpan, RecordedPass, RecordedStep, Share, TileJob
from ridgeline.models import PRESETS, describe, lower
from ridgeline.roofline import PricedModel, decode_batch, op_costs
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel
from ridgeline.roofline.dataflow import buffers_of, passed_on
from ridgeline.roofline.profile import make_profile
from ridgeline.roofline.profile_trace import chrome_trace, flame_svg

SPEC = describe(PRESETS["llama-3.2-1b"]).spec
MODEL = PricedModel(spec=SPEC, ops=lower(SPEC))
MODELS = {ModelRole.TARGET: MODEL}
CEILINGS = Ceilings(
    name="made up",
    levels=(MemoryLevel(name="DRAM", size_bytes=1e12, bytes_per_s=50e9),),
    flops_per_s={"float32": 1e12, "bfloat16": 2e12},
)
OP_S, GAP_S, CONTEXT = 100e-6, 10e-6, 7


def shared_job(begin_s, end_s, *, busy_s):
    """Two threads, of which the second works half as long."""
    shares = tuple(
        Share(thread=n, num_tiles=4, begin_s=begin_s, end_s=begin_s + each, busy_s=each)
        for n, each in enumerate((busy_s, busy_s / 2))
    )
    return TileJob(num_tiles=8, begin_s=begin_s, end_s=end_s, shares=shares)


def step(number, begin_s, *, num_steps=1):
    """Every op takes `OP_S`, of which its threads share 80 µs; `GAP_S` after each."""
    segment = Segment(
        slot=0, start=CONTEXT - 1, stop=CONTEXT, token_ids=(5,), outputs=Outputs(sample=True)
    )
    plan = StepPlan(step_id=number, passes=(Pass(segments=(segment,), num_steps=num_steps),))
    at, passes = begin_s, []
    for repeat in range(num_steps):
        spans = []
        for place, op in enumerate(MODEL.ops):
            job = shared_job(at, at + 80e-6, busy_s=60e-6)
            name, end_s = type(op).__name__, at + OP_S
            spans.append(
                OpSpan(name=name, ops=(place,), begin_s=at, end_s=end_s, num_threads=2, jobs=(job,))
            )
            at = end_s + GAP_S
        passes.append(
            RecordedPass(role=ModelRole.TARGET, pass_index=0, step=repeat, spans=tuple(spans))
        )
    return RecordedStep(plan=plan, begin_s=begin_s, end_s=at, passes=tuple(passes))


def two_steps(**options):
    first = step(1, 100.0, **options)
    return (first, step(2, first.end_s + 1e-3, **options))


def test_every_second_is_in_one_row():
    profile = make_profile(two_steps(), MODELS, CEILINGS)
    assert profile.sum_s == pytest.approx(profile.seconds)
    assert profile.gap_s == pytest.approx(1e-3 / 2)
    assert profile.host_s == pytest.approx(GAP_S * len(MODEL.ops))
    assert sum(row.seconds for row in profile.rows) == pytest.approx(OP_S * len(MODEL.ops))
    for row in profile.rows:
        assert row.seconds == pytest.approx(row.work_s + row.wait_s + row.serial_s)
        assert row.work_s == pytest.approx(45e-6 * row.count)
        assert row.wait_s == pytest.approx(35e-6 * row.count)
        assert row.serial_s == pytest.approx(20e-6 * row.count)


def test_spans_that_overlap_show_in_the_sum():
    first, second = two_steps()
    twice = RecordedStep(
        plan=first.plan, begin_s=first.begin_s, end_s=first.end_s, passes=first.passes * 2
    )
    profile = make_profile((twice, second), MODELS, CEILINGS)
    assert profile.sum_s > 1.3 * profile.seconds


def test_bytes_and_flops_are_those_of_the_price():
    profile = make_profile(two_steps(), MODELS, CEILINGS)
    num_bytes, flops = Counter(), Counter()
    for cost in op_costs(MODEL, decode_batch(1, CONTEXT)):
        num_bytes[type(cost.op).__name__] += cost.work.num_bytes * cost.count
        flops[type(cost.op).__name__] += cost.work.flops * cost.count
    assert {row.name: row.num_bytes for row in profile.rows} == pytest.approx(num_bytes)
    assert {row.name: row.flops for row in profile.rows} == pytest.approx(flops)
    head = next(row for row in profile.rows if row.name == "Head")
    assert head.bytes_per_s == pytest.approx(head.num_bytes / OP_S)
    assert head.ceiling_bytes_per_s == pytest.approx(50e9)
    assert head.roof_s == pytest.approx(head.num_bytes / 50e9)


def test_without_ceilings_there_is_no_roof():
    profile = make_profile(two_steps(), MODELS)
    assert {row.roof_s for row in profile.rows} == {None}
    assert json.loads(json.dumps(profile.to_json()))["ceilings"] is None


def test_a_replay_counts_as_its_steps():
    alone = make_profile(two_steps(), MODELS)
    replayed = make_profile(two_steps(num_steps=3), MODELS)
    assert (replayed.num_plans, replayed.num_steps, replayed.num_tokens) == (2, 6, 1)
    assert {row.name: row.seconds for row in replayed.rows} == pytest.approx(
        {row.name: row.seconds for row in alone.rows}
    )


def test_rows_by_layer():
    profile = make_profile(two_steps(), MODELS, by_layer=True)
    layers = sorted(row.layer for row in profile.rows if row.name == "Attend")
    assert layers == list(range(16))
    assert [row.layer for row in profile.rows if row.name == "Head"] == [None]


def test_fusions_save_what_the_next_op_reads_and_gaps():
    profile = make_profile(two_steps(), MODELS, CEILINGS)
    found = {(each.first, each.second): each for each in profile.fusions}
    pair = found["OutProject", "AddResidual"]
    assert pair.count == 16
    assert pair.num_bytes == 16 * 2 * SPEC.hidden_size * MODEL.activation_bytes
    assert pair.bytes_s == pytest.approx(pair.num_bytes / 50e9)
    assert pair.gap_s == pytest.approx(16 * (OP_S + GAP_S - 60e-6))
    attend = found["KVWrite", "Attend"]  # what attention reads is in the cache
    assert attend.num_bytes == 0
    assert pair.seconds > attend.seconds


def test_what_ops_pass_on():
    norm, rope, write, mlp, head = (
        next(op for op in MODEL.ops if isinstance(op, kind))
        for kind in (Norm, Rope, KVWrite, MLP, Head)
    )
    width = SPEC.hidden_size
    assert passed_on(norm, mlp, width) == width
    assert passed_on(rope, write, width) == 8 * 64  # K alone is rotated and written
    assert passed_on(mlp, head, width) == width
    assert buffers_of(head, width)[1] == {}


def test_no_steps():
    with pytest.raises(InvalidRequestError, match="No step"):
        make_profile((), MODELS)


def test_the_trace_nests_and_is_in_microseconds():
    steps = two_steps()
    trace = json.loads(json.dumps(chrome_trace(steps, title="<made up>")))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "steps", 1: "ops", 2: "thread 0", 3: "thread 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    ops = [event for event in spans if event["tid"] == 1]
    assert len(ops) == 2 * len(MODEL.ops)
    assert all(op["dur"] == pytest.approx(100) for op in ops)
    for track in names:  # on a track, one ends before the next begins
        on_it = sorted((e for e in spans if e["tid"] == track), key=lambda event: event["ts"])
        for earlier, later in pairwise(on_it):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3


def test_the_flame_bar_is_as_wide_as_the_step():
    profile = make_profile(two_steps(), MODELS, CEILINGS)
    root = ElementTree.fromstring(flame_svg(profile, title="a < b"))
    boxes = [
        (group[0].text, float(group[1].get("width")), float(group[1].get("y"))) for group in root
    ]
    rows = sorted({y for _, _, y in boxes})
    assert boxes[0][0].startswith("a < b")
    assert sum(width for _, width, y in boxes if y == rows[1]) == pytest.approx(1000, abs=1)
