"""A whole calibration, measured for real, on models that take milliseconds."""

import math
import time

import pytest

from ridgeline.bench import calibration as bench
from ridgeline.bench import kept_rounds
from ridgeline.bench.kept_rounds import KeptRounds
from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.core.plan import ModelRole
from ridgeline.executors import executor_traits
from ridgeline.executors.simulated import SimulatedExecutor
from ridgeline.roofline import decode_batch, pass_work
from ridgeline.roofline.batch import batches_of
from ridgeline.roofline.calibration import describe, load, save
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel
from ridgeline.roofline.predict import StepPredictor

SMALL = {
    "one": bench.shape(128, 256, 2, 4, 2, 256),
    "two": bench.shape(192, 256, 3, 4, 4, 256),
}
STEPS = tuple(
    StepShape(batch_size=b, num_tokens=n, context=c)
    for b, n, c in ((1, 1, 16), (2, 1, 60), (1, 16, 0), (2, 8, 20))
)


def test_a_quick_calibration_is_quick_and_says_so(tmp_path, monkeypatch):
    """Every other step, and no round once its time is over; predictions tell of it."""
    monkeypatch.setattr(bench, "QUICK_S", 0.0)
    made = bench.calibrate_here(
        "reference",
        shapes=SMALL,
        formats=("float32",),
        steps=STEPS,
        quick=True,
        kept_path=tmp_path / "kept",
    )
    assert made.ceilings.conditions["quick"]
    assert "measured in 90 s" in describe(made)
    assert not (tmp_path / "kept").exists()


def test_wide_matrices_are_in_no_cache_in_any_format():
    """What a cache holds hides fewer products than what main memory brings."""
    for form in executor_traits("cpu").calibrated_formats:
        model = bench.price_of(bench.SHAPES["wide"], form, executor="cpu")
        assert pass_work(model, decode_batch(1, 1)).num_bytes > 64 << 20


def routed(executor):
    return sum(executor.expert_tokens().values())


def test_a_step_of_several_kinds_runs_as_it_is_priced():
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    config = bench.shape(128, 64, 2, 4, 2, 256, **experts)
    model = bench.build("experts", config, "float32", executor="cpu")
    step = StepShape(batch_size=2, num_tokens=3, context=20, drafts=2, decodes=4)
    assert (step.kind, step.phase) == ("mixed", "decode")
    timer = StepTimer(model.executor, [step])
    plan = timer.plan(step)
    (run,) = batches_of(plan.passes[0])
    assert (*run.starts, *run.stops) == (*step.batch.starts, *step.batch.stops)
    assert run.logit_rows == step.batch.logit_rows == 10
    assert len({segment.token_ids for segment in plan.passes[0].segments}) == 6
    before = routed(model.executor)
    assert timer.run(plan) > 0
    counts = routed(model.executor) - before
    assert counts.sum() == 10 * 2 * 2  # tokens, layers, experts of a token
    assert (counts > 0).all()
    model.executor.close()


@pytest.mark.slow
def test_calibrating_here(tmp_path):
    told = []
    made = bench.calibrate_here(
        "reference",
        shapes=SMALL,
        formats=("float32",),
        steps=STEPS,
        progress=lambda done, total, label: told.append(f"{label} {done}/{total}"),
    )
    assert told[:3] == [
        "making one in float32 0/2", "making two in float32 1/2", "measuring one in float32 0/10",
    ]  # fmt: skip
    assert made.measured
    assert made.shapes == ("one", "two")
    assert made.host_step_s + made.host_segment_s > 0
    assert not made.ceilings.conditions["quick"]
    save(made, tmp_path / "calibration.json")
    assert load(tmp_path / "calibration.json") == made
    model = bench.build("one", SMALL["one"], "float32", executor="reference")
    predictor = StepPredictor({ModelRole.TARGET: model.priced}, made)
    assert 0 < predictor.batch_seconds(decode_batch(1, 16)) < 1.0
    model.executor.close()


def test_steps_are_visited_in_turns_and_the_fastest_visit_counts():
    models = [
        (bench.build(name, SMALL[name], "float32", executor="reference"), STEPS) for name in SMALL
    ]
    rounds = []
    measured = bench.measure_in_turns(models, rounds=2, between=lambda: rounds.append(0))
    assert len(rounds) == 2
    assert [[each.step for each in times] for times in measured] == [list(STEPS)] * 2
    for each in (each for times in measured for each in times):
        assert len(each.visits_s) == 2
        assert all(len(visit) >= 3 for visit in each.visits_s)
        assert each.seconds == min(one.seconds for one in each.halves())


@pytest.mark.parametrize(("busy_rounds", "num_rounds"), [(0, 2), (1, 3), (9, 4)])
def test_rounds_that_others_disturb_are_repeated(monkeypatch, busy_rounds, num_rounds):
    """As often again as there were to be; what others took is told for each."""
    coming = iter([0.5] * busy_rounds + [0.0] * 9)
    monkeypatch.setattr(bench.Watch, "others_share", lambda _: next(coming))
    model = bench.build("one", SMALL["one"], "float32", executor="reference")
    shares: list[float] = []
    (times,) = bench.measure_in_turns([(model, STEPS[:1])], rounds=2, most_rounds=4, shares=shares)
    assert len(times[0].visits_s) == len(shares) == num_rounds
    assert bench.num_quiet(shares) == min(2, num_rounds - min(busy_rounds, num_rounds))


def rounds_of(kept, *, rounds=5, interrupted_in=None, until_s=math.inf):
    """The times of a model's steps, and how many rounds were measured for them."""
    begun = []

    def between():
        begun.append(len(begun))
        if interrupted_in == len(begun):
            raise KeyboardInterrupt

    model = bench.build("one", SMALL["one"], "float32", executor="reference")
    (times,) = bench.measure_in_turns(
        [(model, STEPS[:2])], rounds=rounds, between=between, kept=kept, until_s=until_s
    )
    return times, len(begun)


def test_a_measurement_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    path, wanted = tmp_path / "kept", {"steps": "a"}
    monkeypatch.setattr(bench.Watch, "others_share", lambda _: 0.0)
    with pytest.raises(KeyboardInterrupt):
        rounds_of(KeptRounds(path, wanted), interrupted_in=3)
    before = KeptRounds(path, wanted).visits
    assert all(len(step) == 2 for model in before for step in model)
    for other in ({"steps": "b"}, {}):
        assert KeptRounds(path, other).visits is None
    times, begun = rounds_of(KeptRounds(path, wanted))
    assert begun == 3
    assert [each.visits_s[:2] for each in times] == [tuple(step) for step in before[0]]
    assert all(len(each.visits_s) == 5 for each in times)
    monkeypatch.setattr(kept_rounds, "_MAX_AGE_S", 0.0)
    assert KeptRounds(path, wanted).visits is None
    monkeypatch.undo()
    for damaged in ("{", "[]", '{"key": 1}', path.read_text().replace("[", "{", 1)):
        path.write_text(damaged)
        assert KeptRounds(path, wanted).visits is None
    KeptRounds(path, wanted).forget()
    assert not path.exists()


def test_no_round_begins_once_the_time_is_over():
    assert rounds_of(None, until_s=time.monotonic())[1] == 1


def test_the_host_is_timed_by_steps_that_are_no_replays(monkeypatch):
    """Steps that take no time are packed into replays of 16, which the host handles as one."""
    plans = []

    class Recording(SimulatedExecutor):
        def submit(self, plan):
            plans.append(plan)
            return super().submit(plan)

    monkeypatch.setattr(bench, "SimulatedExecutor", Recording)
    assert min(bench.host_seconds(num_steps=8)) >= 0
    assert len(plans) > 8
    assert all(a_pass.num_steps == 1 for plan in plans for a_pass in plan.passes)


def test_the_best_rates_of_a_run_are_its_ceilings():
    """As the fastest visit of a step counts: the machine may have been slow when it was measured
    first."""
    memory = MemoryLevel(name="DRAM", size_bytes=1e9, bytes_per_s=20e9)
    before = Ceilings(name="t", levels=(memory,), flops_per_s={"float32": 1e9, "int8": 4e9})
    rates = [
        bench.Rates(memory=30e9, operations={"float32": 2e9, "int8": 3e9}),
        bench.Rates(memory=10e9, operations={"float32": 1.5e9}),
    ]
    best = bench.with_best(before, rates)
    assert best.memory.bytes_per_s == 30e9
    assert best.flops_per_s == {"float32": 2e9, "int8": 4e9}


def test_a_quantized_model_is_priced_as_it_is_stored():
    config = bench.shape(256, 512, 2, 4, 2, 512)
    model = bench.build("q", config, "int4", executor="cpu")
    assert model.priced.weight_formats["layers.0.q"].name == "int4"
    model.executor.close()
