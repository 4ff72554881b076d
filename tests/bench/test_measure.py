"""What is reported of a case follows from its seconds, its plans and the ceilings."""

import json
from dataclasses import replace

import pytest
from tests.bench.test_ceilings import FakeLoops
from tests.roofline.test_fitting import CEILINGS, priced, samples
from tests.tiny import tiny_model

from ridgeline.bench import energy, executor_bench
from ridgeline.bench.cases import make_cases
from ridgeline.bench.ceilings import CeilingMeter
from ridgeline.bench.executor_bench import BenchReport
from ridgeline.bench.measure import Measurement, reached, run_rounds
from ridgeline.bench.steps import TimedStep
from ridgeline.bench.workloads import make_workloads
from ridgeline.cli.main import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import BFLOAT16, FLOAT16, number_format
from ridgeline.core.host import cpu_name
from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan
from ridgeline.executors import create_executor
from ridgeline.roofline import PricedModel, Work, price
from ridgeline.roofline.calibration import (
    calibrate,
    calibration_path,
    contradiction,
    describe,
    load,
    save,
)
from ridgeline.roofline.memory import bits_per_weight


def ceilings_of(loops=None):
    meter = CeilingMeter(loops or FakeLoops(), threads=1)
    meter.sample()
    return meter.report()


def measurement(work: Work, seconds: float) -> Measurement:
    (case,) = make_cases([], [4], [8])
    return Measurement(case=case, seconds=seconds, plans=(), work=work, num_samples=1)


def test_shares_are_of_the_rate_of_memory_and_of_the_formats_peak():
    ceilings = (
        ceilings_of().ceilings()
    )  # every level at 30 bytes/s, float32 at 100 FLOP/s, int4 at 500
    work = Work(flops=50.0, weight_bytes=40.0, kv_read_bytes=15.0, kv_write_bytes=5.0,
                activation_bytes=1e9)  # fmt: skip
    share = reached(measurement(work, seconds=4.0), ceilings, FLOAT16)
    assert share.mbu == pytest.approx(60 / (4 * 30))
    assert share.mfu == pytest.approx(50 / (4 * 100))
    assert share.bound == "memory"  # 2 s against 0.5 s
    faster = reached(measurement(work, seconds=4.0), ceilings, number_format("int4-g64"))
    assert faster.mfu == pytest.approx(50 / (4 * 500))
    compute = Work(flops=2000.0, weight_bytes=60.0)
    slow = reached(measurement(compute, seconds=30.0), ceilings, number_format("int8"))
    assert slow.bound == "compute"


def test_bits_per_weight_count_scales_and_the_head_but_not_an_embedding_that_is_looked_up():
    model = tiny_model()
    int4 = number_format("int4")
    names = {weight for weight in model.weights if model.weights[weight].ndim == 2}
    every = PricedModel(
        spec=model.spec,
        ops=model.ops,
        activations=BFLOAT16,
        weight_formats=dict.fromkeys(names, int4),
    )
    exact = 4 + 16 / int4.group_size
    assert exact < bits_per_weight(every) < exact + 0.6  # rows are short, norms are in 16 bits
    without = {name: int4 for name in names if name != "head"}
    plain_head = PricedModel(
        spec=model.spec, ops=model.ops, activations=BFLOAT16, weight_formats=without
    )
    assert bits_per_weight(plain_head) > bits_per_weight(every) + 1
    embedding = {name: int4 for name in names if name != "embed"}
    plain_embedding = PricedModel(
        spec=model.spec, ops=model.ops, activations=BFLOAT16, weight_formats=embedding
    )
    assert bits_per_weight(plain_embedding) == bits_per_weight(every)


def test_rounds_visit_every_case_and_report_its_own_work():
    model = tiny_model()
    executor = create_executor(
        {ModelRole.TARGET: model}, EngineConfig(executor="reference", block_tokens=4)
    )
    workloads = make_workloads(
        executor, make_cases([12], [1, 3], [0, 6]), chunk_tokens=8, decode_steps=600
    )
    priced = PricedModel(spec=model.spec, ops=model.ops)
    meter = CeilingMeter(FakeLoops(), threads=1)
    labels = []

    def progress(done, total, label):
        assert 0 <= done < total
        labels.append(label)

    found = run_rounds(workloads, priced, meter, rounds=2, progress=progress)
    assert [m.num_tokens for m in found] == [12, 1, 3, 1, 3]
    assert labels.count("ceilings") == 2
    prefill, one, three, one_far, three_far = found
    assert prefill.num_samples == 2
    assert [plan.num_tokens for plan in prefill.plans] == [8, 4]
    row_bytes = 2 * model.spec.hidden_size
    assert three.work.weight_bytes == one.work.weight_bytes + 2 * row_bytes  # of the embedding
    assert three.work.kv_write_bytes == 3 * one.work.kv_write_bytes
    assert one_far.plans[0].passes[0].segments[0].stop > 6
    assert three_far.tokens_per_s == 3 / three_far.seconds
    executor.close()


def test_a_prediction_is_the_calibrations_or_else_what_the_roof_allows():
    class Double:
        def seconds(self, plan):
            return 2.0

    model = tiny_model()
    priced = PricedModel(spec=model.spec, ops=model.ops)
    found = measurement(Work(flops=1.0, weight_bytes=1.0), seconds=0.5)
    segments = tuple(Segment(slot=n, start=8, stop=9, token_ids=(1,)) for n in range(4))
    plan = StepPlan(step_id=1, passes=(Pass(segments=segments),))
    found = replace(found, plans=(plan, plan))
    fields = {
        "model": "m", "executor": "cpu", "priced": priced, "ceilings": ceilings_of(),
        "measurements": [found],
    }  # fmt: skip
    report = BenchReport(**fields).to_json()
    (case,) = report["cases"]
    work = price({ModelRole.TARGET: priced}, plan).work
    assert report["predicted_by"] == "roof"
    # Every level reads 30 bytes/s; a few ops are bound by arithmetic instead.
    assert 1 <= case["predicted_s"] / (2 * work.num_bytes / 30.0) < 1.2
    assert case["decode_tok_s"] == 8.0
    assert case["prefill_tok_s"] is None
    report = BenchReport(**fields, predictor=Double()).to_json()
    (case,) = report["cases"]
    assert report["predicted_by"] == "calibration"
    assert case["predicted_s"] == 4.0


def test_energy_is_that_of_the_counters_while_a_case_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_RAPL", tmp_path)
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "energy_uj").write_text("0")

    class Hungry:
        """Five joules a visit."""

        (case,) = make_cases([8], [], [0])

        def prepare(self):
            pass

        def visit(self, seconds):
            spent = int((zone / "energy_uj").read_text()) + 5_000_000
            (zone / "energy_uj").write_text(str(spent))
            plan = StepPlan(step_id=1, passes=())
            return [[TimedStep(plan=plan, result=None, seconds=0.25)]]

    model = tiny_model()
    priced = PricedModel(spec=model.spec, ops=model.ops)
    meter = CeilingMeter(FakeLoops(), threads=1)
    (found,) = run_rounds([Hungry()], priced, meter, rounds=3)
    assert found.energy == energy.Energy(joules=15.0, source="rapl", valid=True)
    found = replace(found, visited_s=1.0)  # four prompts at that rate
    assert found.joules_per_token == pytest.approx(15.0 / (4 * 8))
    for contended in (False, True):
        ceilings = replace(ceilings_of(), conditions={"contended": contended, "cpu": "c"})
        report = BenchReport(
            model="m", executor="cpu", priced=priced, ceilings=ceilings, measurements=[found]
        )
        (case,) = report.to_json()["cases"]
        assert case["energy_source"] == "rapl"
        assert case["energy_valid"] is not contended


def test_the_calibration_of_another_machine_predicts_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model()
    priced = PricedModel(spec=model.spec, ops=model.ops)
    for cpu, is_used in ((cpu_name(), True), ("another", False)):
        ceilings = replace(CEILINGS, conditions={"cpu": cpu})
        found = calibrate(samples(), ceilings, executor="cpu", dense_attention=False)
        save(found, calibration_path("cpu"))
        assert (executor_bench._predictor(priced, "cpu") is not None) == is_used


def planted(tmp_path, monkeypatch, *, slower, contended):
    """A calibration of steps that took some times as long as they do, made on a busy machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceilings = replace(CEILINGS, conditions={"contended": contended, "others_share": 0.42})
    slow = [replace(each, seconds=slower * each.seconds) for each in samples()]
    found = calibrate(slow, ceilings, executor="cpu", dense_attention=False)
    save(found, calibration_path("cpu"))
    return executor_bench._predictor(priced("qwen2.5-0.5b"), "cpu")


@pytest.mark.parametrize("quiet", [True, False])
def test_steps_that_contradict_a_calibration_correct_it(tmp_path, monkeypatch, quiet):
    """Made on a busy machine it predicts 2.5 times too much, and says so; a quiet measurement
    scales it, and what a busy one finds is said alone."""
    honest = planted(tmp_path / "honest", monkeypatch, slower=1.0, contended=False)
    predictor = planted(tmp_path, monkeypatch, slower=2.5, contended=True)
    assert "took 42% of the processors while it was measured" in describe(predictor.calibration)
    segments = (Segment(slot=0, start=8, stop=9, token_ids=(1,)),)
    plan = StepPlan(step_id=1, passes=(Pass(segments=segments),))
    found = replace(measurement(Work(), seconds=honest.seconds(plan)), plans=(plan,))
    told = executor_bench.contradicted(predictor, [found], quiet=quiet)
    assert told.startswith("Steps take 0.4")
    kept = load(calibration_path("cpu"))
    if not quiet:
        assert kept == predictor.calibration
        return
    after = executor_bench._predictor(predictor.models[ModelRole.TARGET], "cpu")
    assert after.seconds(plan) == pytest.approx(found.seconds)
    assert sum(after.plan_parts(plan).values()) == pytest.approx(found.seconds)
    assert "corrected to 0.4" in describe(kept)
    assert executor_bench.contradicted(after, [found], quiet=True) is None


def test_steps_that_disagree_with_each_other_contradict_nothing():
    assert contradiction([]) is None
    assert contradiction([0.4, 1.1]) is None
    assert contradiction([1.7, 3.0, 2.0]) == 2.0


def test_the_command_ends_in_one_object_or_a_table(monkeypatch, capsys):
    monkeypatch.setattr(executor_bench, "load_native_loops", FakeLoops)
    command = ["bench", "--executor", "reference", "--prompt", "8", "--batch", "1,2",
               "--context", "0", "--rounds", "1"]  # fmt: skip
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in report["cases"]] == ["prefill 8", "decode 1", "decode 2"]
    required = {"name", "prompt_tokens", "batch", "context", "prefill_tok_s", "decode_tok_s",
                "mfu", "mbu", "bound", "predicted_s", "measured_s", "joules_per_token",
                "energy_valid"}  # fmt: skip
    assert all(required <= set(case) for case in report["cases"])
    assert report["ceilings"]["conditions"]["threads"] >= 1
    assert report["kv_reuse"] == []
    assert main(command) == 0
    assert "decode 2" in capsys.readouterr().out


def test_what_kv_reuse_gives_is_measured_beside_its_prediction(monkeypatch, capsys):
    """Without it a token takes the seconds of its whole context: the longer, the more."""
    monkeypatch.setattr(executor_bench, "load_native_loops", FakeLoops)
    command = ["bench", "--executor", "reference", "--prompt", "", "--batch", "", "--context",
               "4,400", "--rounds", "1", "--no-reuse-kv"]  # fmt: skip
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cases = {case["name"]: case for case in report["cases"]}
    assert set(cases) == {
        f"decode 1 at {at}{rest}" for at in (4, 400) for rest in ("", ", no KV cache")
    }
    short, long = report["kv_reuse"]
    assert (short["context"], long["context"]) == (4, 400)
    for row in (short, long):
        kept, anew = (
            cases[f"decode 1 at {row['context']}{rest}"] for rest in ("", ", no KV cache")
        )
        assert row["ratio"] == pytest.approx(anew["measured_s"] / kept["measured_s"])
        assert row["predicted_ratio"] == pytest.approx(anew["predicted_s"] / kept["predicted_s"])
        assert anew["decode_tok_s"] == pytest.approx(1 / anew["measured_s"])
    assert long["predicted_ratio"] > 5 * short["predicted_ratio"]
    assert main(command) == 0
    assert "KV reuse at 400: a token comes " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "no-such-shape"], "no-such-shape"),
        (["model", "--shape", "llama-3.2-1b"], "not both"),
        (["--rounds", "0"], "--rounds"),
        (["--prompt", "999999"], "999999"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(executor_bench, "load_native_loops", FakeLoops)
    assert main(["bench", "--executor", "reference", *arguments]) == 2
    assert message in capsys.readouterr().err
