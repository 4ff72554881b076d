"""The observer against hand-made steps: attribution, wasted drafts, impossible shares, overhead."""

import time
import tracemalloc
from dataclasses import replace

import pytest
from tests.roofline.test_fitting import CEILINGS, samples
from tests.tiny import CONFIG, Driver, tiny_executor, tiny_model

from ridgeline.core.formats import FLOAT32, number_format
from ridgeline.core.plan import Admission, ModelRole, Outputs, Pass, Segment, StepPlan
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.models import PRESETS, describe, lower
from ridgeline.roofline import PricedModel, decode_batch, pass_work, prefill_batch
from ridgeline.roofline.account import account
from ridgeline.roofline.calibration import calibrate
from ridgeline.roofline.explain import product_peak
from ridgeline.roofline.history import past_errors, read, record
from ridgeline.roofline.live import Observer
from ridgeline.roofline.predict import StepPredictor, step_phase

SPEC = describe(dict(PRESETS["qwen2.5-0.5b"])).spec
MODEL = PricedModel(spec=SPEC, ops=lower(SPEC), activations=FLOAT32)
MODELS = {ModelRole.TARGET: MODEL}
SAMPLE = Outputs(sample=True)


@pytest.fixture(scope="module")
def calibration():
    return calibrate(samples(), CEILINGS, executor="test", dense_attention=False)


def observer(calibration):
    return Observer(MODELS, StepPredictor(MODELS, calibration))


def segment(slot, start, count, **fields):
    return Segment(
        slot=slot, start=start, stop=start + count, token_ids=(1,) * count, outputs=SAMPLE, **fields
    )


def step(*segments, accepted=()):
    plan = StepPlan(step_id=1, passes=(Pass(segments=segments),))
    outcomes = tuple(
        SegmentResult(token_ids=(1,) * (1 + len(accepted)), accepted=accepted) for _ in segments
    )
    return plan, StepResult(step_id=1, passes=(outcomes,))


def test_shares_of_the_ceilings(calibration):
    watch = observer(calibration)
    work = pass_work(MODEL, decode_batch(1, 100))
    watch.observe(*step(segment(0, 99, 1)), measured_s=2 * work.num_bytes / 20e9)
    report = watch.report()
    assert report.decode.mbu == pytest.approx(0.5, rel=1e-6)
    assert report.decode.bound == "memory"
    assert report.prefill.seconds == 0
    assert report.prefill.mbu is None
    assert not report.warnings


def test_the_bound_is_what_most_of_the_time_goes_to():
    """A model of a few megabytes waits for neither memory nor arithmetic."""
    calibration = calibrate(samples(), CEILINGS, executor="test", dense_attention=False)
    spec = describe(CONFIG).spec
    models = {ModelRole.TARGET: PricedModel(spec=spec, ops=lower(spec), activations=FLOAT32)}
    watch = Observer(models, StepPredictor(models, calibration))
    watch.observe(*step(segment(0, 30, 1)), measured_s=1e-3)
    report = watch.report()
    assert report.decode.mbu > report.decode.mfu
    assert report.decode.bound == "overhead"
    assert report.prefill.bound is None
    watch.observe(*step(segment(0, 31, 1), segment(1, 0, 16)), measured_s=1e-3)
    assert watch.report().prefill.bound == "overhead"  # also where every step decodes, too


def test_more_than_the_ceiling_is_an_error_of_ours(calibration):
    watch = observer(calibration)
    work = pass_work(MODEL, decode_batch(1, 100))
    watch.observe(*step(segment(0, 99, 1)), measured_s=0.5 * work.num_bytes / 20e9)
    assert "cannot be" in watch.report().warnings[0]


def test_steps_of_a_replay_read_the_same_weights_again():
    """Weights that a cache holds stay there from step to step: its rate is their ceiling."""
    size = pass_work(MODEL, decode_batch(1, 108)).num_bytes
    cache = replace(CEILINGS.levels[0], size_bytes=2 * size)
    ceilings = replace(CEILINGS, levels=(cache, CEILINGS.levels[1]))
    fitted = calibrate(samples(), ceilings, executor="test", dense_attention=False)
    watch = Observer(MODELS, StepPredictor(MODELS, fitted))
    plan = StepPlan(step_id=1, passes=(Pass(segments=(segment(0, 99, 1),), num_steps=16),))
    outcome = SegmentResult(token_ids=(1,) * 16)
    result = StepResult(step_id=1, passes=((outcome,),))
    watch.observe(plan, result, measured_s=2 * 16 * size / 60e9)
    assert watch.report().decode.mbu == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("planned", "ran"), [(16, 2), (2, 2)], ids=["ended early", "whole"])
def test_a_replay_reads_as_often_as_it_ran(planned, ran):
    size = pass_work(MODEL, decode_batch(1, 108)).num_bytes
    plan = StepPlan(step_id=1, passes=(Pass(segments=(segment(0, 99, 1),), num_steps=planned),))
    result = StepResult(step_id=1, passes=((SegmentResult(token_ids=(1,) * ran),),))
    assert account(MODELS, plan, result).bytes_at_once == pytest.approx(size, rel=1e-3)


def test_drafts_of_several_steps_make_no_pass_of_the_target_smaller():
    models = dict.fromkeys(ModelRole, MODEL)
    drafts = Pass(segments=(segment(0, 99, 1),), role=ModelRole.DRAFT, num_steps=4)
    plan = StepPlan(step_id=1, passes=(drafts, Pass(segments=(segment(0, 99, 1),))))
    outcomes = (SegmentResult(token_ids=(1,) * 4),), (SegmentResult(token_ids=(1,)),)
    size = pass_work(MODEL, decode_batch(1, 100)).num_bytes
    done = account(models, plan, StepResult(step_id=1, passes=outcomes))
    assert done.bytes_at_once == pytest.approx(2 * size, rel=1e-2)


def test_products_of_codes_are_a_share_of_the_peak_of_codes():
    """The cpu executor holds activations in float32, and multiplies its weights as integers."""
    ceilings = replace(CEILINGS, flops_per_s={"float32": 100e9, "int4": 400e9})
    held = replace(MODEL, weights=number_format("int4"), products_by_weight=True)
    models = {ModelRole.TARGET: held}
    fitted = calibrate(samples(), ceilings, executor="test", dense_attention=False)
    watch = Observer(models, StepPredictor(models, fitted))
    work = pass_work(held, prefill_batch(300))
    watch.observe(*step(segment(0, 0, 300)), measured_s=2 * work.flops / 400e9)
    report = watch.report()
    assert report.prefill.mfu == pytest.approx(0.5, rel=1e-6)
    assert not report.warnings
    assert product_peak(held, fitted) == 400e9


def test_a_step_is_prefill_if_the_target_computes_more_than_a_token_and_its_drafts():
    prompt, verified = segment(0, 0, 5), segment(1, 9, 3, num_drafts=2)
    draft = Pass(role=ModelRole.DRAFT, segments=(prompt,))
    for segments, phase in (((verified,), "decode"), ((verified, prompt), "prefill")):
        target = Pass(segments=segments)
        assert step_phase(StepPlan(step_id=1, passes=(target,))) == phase
        assert step_phase(StepPlan(step_id=1, passes=(draft, target))) == phase


def test_rejected_drafts_are_not_useful(calibration):
    watch = observer(calibration)
    drafted = segment(0, 99, 5, num_drafts=4)
    watch.observe(*step(drafted, accepted=(0,)), measured_s=0.2)
    report = watch.report()
    kept = pass_work(MODEL, prefill_batch(2, start=99)).flops
    head = 2 * SPEC.vocab_size * SPEC.hidden_size  # the second row of logits
    assert report.decode.useful_flops == pytest.approx(kept + head, rel=1e-9)
    whole = pass_work(MODEL, prefill_batch(5, start=99)).num_bytes
    assert report.decode.moved_bytes == pytest.approx(whole, rel=0.02)
    assert (report.drafted, report.accepted) == (4, 1)


def test_adapters_are_those_that_sequences_were_admitted_with(calibration):
    """A sequence's adapter is named once; its slot may later be that of one without."""
    rank_bytes, measured_s = 4 * 10**7, 0.1
    models = {ModelRole.TARGET: replace(MODEL, adapter_elements=(10**6, 10**7))}
    watch = Observer(models, StepPredictor(models, calibration), size=1)
    plain = pass_work(MODEL, decode_batch(2, 100))
    decode = segment(0, 99, 1), segment(1, 99, 1)

    def admit(plan, *adapters):
        admissions = tuple(
            Admission(
                slot=slot,
                token_ids=(1,) * 100,
                num_prompt_tokens=100,
                params=SamplingParams(),
                seed=0,
                adapter=adapter,
            )
            for slot, adapter in enumerate(adapters)
        )
        return replace(plan, admissions=admissions)

    def observe(*adapters):
        before = watch.report().decode
        plan, result = step(*decode)
        watch.observe(admit(plan, *adapters), result, measured_s)
        after = watch.report().decode
        added = after.moved_bytes - before.moved_bytes, after.useful_flops - before.useful_flops
        return added[0] - plain.num_bytes, added[1] - plain.flops

    assert observe(2, 2) == pytest.approx((rank_bytes, 4e7))
    seconds = watch.report().decode.predicted_s
    assert observe() == pytest.approx((rank_bytes, 4e7))
    assert observe(0) == pytest.approx((rank_bytes, 2e7))
    assert observe(0, 0) == pytest.approx((0, 0), abs=1)
    watch._spent_s = 1e9  # nothing is priced in passing: this admission's step is dropped
    plan, result = step(*decode)
    watch.observe(admit(plan, 1, 2), result, measured_s)
    watch.observe(plan, result, measured_s)
    assert watch.num_dropped == 1
    assert observe() == pytest.approx((1.1 * rank_bytes, 2.2e7))
    raw = StepPredictor(models, calibration).seconds
    assert seconds == pytest.approx(raw(plan, {0: 2, 1: 2}))
    assert raw(plan, {0: 2, 1: 2}) > raw(plan) + 0.9 * rank_bytes / CEILINGS.memory.bytes_per_s


def test_a_mixed_step_is_split_between_its_phases(calibration):
    watch = observer(calibration)
    watch.observe(*step(segment(0, 99, 1), segment(1, 0, 300)), measured_s=3.0)
    report = watch.report()
    assert report.prefill.seconds + report.decode.seconds == pytest.approx(3.0)
    assert report.prefill.tokens == 300
    assert report.decode.tokens == 1
    assert report.prefill.seconds > 10 * report.decode.seconds
    assert report.prefill.median_error is None  # nothing to compare a part of a step with


def test_steps_correct_the_prediction(calibration):
    watch = observer(calibration)
    plan, result = step(segment(0, 99, 1))
    predictor = watch._predictor
    before = predictor.seconds(plan)
    for _ in range(50):
        watch.observe(plan, result, measured_s=1.3 * before)
    report = watch.report()
    assert predictor.correction.factor("decode") == pytest.approx(1.3, rel=0.01)
    assert report.decode.median_error < 0.02
    # The scheduler scales its predictions itself: of a whole and of its parts, by the same factor.
    assert predictor.seconds(plan) == before


def test_steps_that_contradict_the_calibration_are_said(calibration):
    watch = observer(calibration)
    plan, result = step(segment(0, 99, 1))
    before = watch.predictor.seconds(plan)
    for _ in range(30):
        watch.observe(plan, result, measured_s=before / 2.5)
    (warning,) = [each for each in watch.report().warnings if "cannot be" not in each]
    assert warning.startswith("decode: steps take 0.4 times what the calibration of ")


def test_without_a_calibration_there_are_bytes_but_no_shares():
    watch = Observer(MODELS)
    watch.observe(*step(segment(0, 99, 1)), measured_s=0.1)
    report = watch.report()
    assert report.decode.moved_bytes > 1e9
    assert report.decode.mbu is None


def test_observing_costs_little(calibration):
    watch = observer(calibration)
    plan, result = step(*(segment(slot, 99 + slot, 1) for slot in range(32)))
    start = time.process_time()
    for _ in range(300):
        watch.observe(plan, result, measured_s=2e-3)
    spent = time.process_time() - start
    assert spent < 0.04 * 300 * 2e-3  # a wide margin: benchmarks/observation_cost.py has the figure
    assert watch.report().num_steps == 300


def test_noting_a_step_takes_microseconds(calibration):
    watch = observer(calibration)
    plan, result = step(*(segment(slot, 99 + slot, 1) for slot in range(64)))
    start = time.process_time()
    for _ in range(1000):
        watch.observe(plan, result, measured_s=1e-9)  # no time to price anything
    assert time.process_time() - start < 1000 * 60e-6


def test_the_oldest_go_when_nobody_asks():
    watch = Observer(MODELS, size=10)
    plan, result = step(segment(0, 99, 1))
    for _ in range(50):
        watch.observe(plan, result, measured_s=1e-9)  # no time to price anything
    assert watch.num_dropped >= 35
    assert watch.report().num_steps == 50


def test_what_waits_to_be_priced_takes_little_memory(monkeypatch):
    """A model whose steps are shorter than their price fills the queue, and a server held 20 MB."""
    monkeypatch.setattr("ridgeline.roofline.live._SHARE", -1.0)
    watch = Observer(MODELS)
    tracemalloc.start()
    for number in range(3000):
        watch.observe(*step(*(segment(slot, number, 1) for slot in range(8))), measured_s=1e-4)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert watch.num_dropped > 2000
    assert held < 4 << 20, held


def test_real_steps_keep_no_arrays(calibration):
    model = tiny_model(CONFIG, dtype="float32")
    priced = {ModelRole.TARGET: PricedModel(spec=model.spec, ops=model.ops, activations=FLOAT32)}
    driver = Driver(tiny_executor(model=model))
    watch = Observer(priced)
    plan_of = []
    submit = driver.executor.submit
    driver.executor.submit = lambda plan: (plan_of.append(plan), submit(plan))[1]
    segments = driver.segment(
        0, 0, [1, 2, 3], fresh=True, outputs=Outputs(sample=True, logits=True)
    )
    result = driver.run(segments, admissions=(driver.admit(0, [1, 2, 3]),))
    watch.observe(plan_of[0], result, measured_s=1e-12)
    assert all(o.logits is None for _, kept, _ in watch._pending for p in kept.passes for o in p)
    assert watch.report().prefill.tokens == 3


def test_errors_of_past_runs_are_kept(calibration, tmp_path):
    path = tmp_path / "errors.json"
    watch = observer(calibration)
    for _ in range(25):
        watch.observe(*step(segment(0, 99, 1)), measured_s=0.5)
    record(watch.report(), model="m", executor="test", weights="int8", path=path)
    record(watch.report(), model="m", executor="other", weights="int8", path=path)
    assert [run.executor for run in read(path)] == ["test", "other"]
    (past,) = past_errors("test", {"int8"}, path)  # no prefill
    report = watch.report().decode
    assert (past.phase, past.weights, past.num_runs) == ("decode", "int8", 1)
    assert (past.median, past.p90) == (report.median_error, report.p90_error)
    assert past.bias == report.bias > 1.0  # no step takes half a second
    assert past_errors("test", None, path) == [past]
    assert past_errors("test", {"int4"}, path) == []
    path.write_text("not json")
    assert read(path) == []
