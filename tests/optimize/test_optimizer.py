"""The search, on machines that are otherwise than predicted."""

from math import exp, log

import numpy as np
import pytest
from tests.optimize.machines import SimulatedMachine, predictor, task

from ridgeline.optimize import DEFAULT, Candidate, Journal, Objective, Optimizer
from ridgeline.optimize.belief import Belief
from ridgeline.optimize.proof import paired_ratio, ratios_over

FORMATS_ALONE = (
    "kv_cache_dtype", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens",
    "speculation",
)  # fmt: skip
INT4 = ("int4", "int4-g64", "int4-g128")


def quantized(name):
    return Candidate((("quantization", name),))


def find(folder, machine, *, asked=None, **wanted):
    wanted = {"given": FORMATS_ALONE, "budget_s": 120.0} | wanted
    journal = Journal({"asked": asked}, folder)
    found = Optimizer(task(**wanted), predictor(), machine, journal, clock=machine.clock).find()
    journal.forget()
    return found


def test_the_best_by_prediction_is_proven_where_the_machine_is_as_predicted(tmp_path):
    machine = SimulatedMachine(predictor(), noise=0.02)
    found = find(tmp_path, machine)
    assert found.winner.changes[0][1] in INT4
    ratio = found.ratios[found.winner]
    true = machine.true_ratio(found.winner, found)
    assert ratio.low <= true <= ratio.high
    assert found.same.low <= 1.0 <= found.same.high
    (step,) = found.steps
    assert exp(step.believed) == pytest.approx(true, rel=0.05)


def test_a_planted_slow_format_is_found(tmp_path):
    planted = {("quantization", name): 1.3 for name in INT4}
    machine = SimulatedMachine(predictor(), planted=planted, noise=0.02)
    found = find(tmp_path, machine)
    # Whether int8 is faster than none depends on the instructions of the processor at hand.
    others = (DEFAULT, quantized("int8"))
    assert found.winner == max(others, key=lambda each: machine.true_ratio(each, found))


@pytest.mark.parametrize("seed", range(3))
def test_the_default_is_never_replaced_by_something_worse(tmp_path, seed):
    planted = {("quantization", name): 1.2 for name in ("int8", *INT4)}
    machine = SimulatedMachine(predictor(), planted=planted, noise=0.15, seed=seed)
    found = find(tmp_path, machine)
    assert found.winner == DEFAULT or machine.true_ratio(found.winner, found) >= 0.99


def test_no_visit_has_the_texts_of_another(tmp_path):
    machine = SimulatedMachine(predictor(), noise=0.02)
    seeds, visit = [], machine.visit

    def noting(candidate, arrivals, *, seed):
        seeds.append(seed)
        return visit(candidate, arrivals, seed=seed)

    machine.visit = noting
    find(tmp_path, machine)
    assert len(seeds) == len({*seeds}) > 10


def test_equal_settings_leave_the_default(tmp_path):
    machine = SimulatedMachine(predictor(), noise=0.03)
    given = tuple(name for name in FORMATS_ALONE if name != "max_num_batched_tokens")
    found = find(tmp_path, machine, given=(*given, "quantization"))
    assert (found.winner, found.steps) == (DEFAULT, [])


def test_less_memory_is_taken_where_goodput_stays(tmp_path):
    machine = SimulatedMachine(predictor(), noise=0.01)
    given = tuple(name for name in FORMATS_ALONE if name != "max_num_seqs")
    found = find(tmp_path, machine, given=given, objective=Objective.MEMORY)
    predicted = predictor()
    assert predicted.memory_bytes(found.winner) < predicted.memory_bytes(DEFAULT)
    assert machine.true_ratio(found.winner, found) > 0.9


def test_an_interrupted_run_goes_on_with_what_it_measured(tmp_path):
    machine = SimulatedMachine(predictor(), noise=0.02)
    machine.interrupt_after = 7
    with pytest.raises(KeyboardInterrupt):
        find(tmp_path, machine)
    again = SimulatedMachine(predictor(), noise=0.02, seed=1)
    found = find(tmp_path, again)
    assert found.winner.changes[0][1] in INT4
    assert len(found.visits) > len(again.visited)  # the rest is of the first run
    assert not list(tmp_path.rglob("*.json"))  # a whole run leaves nothing
    other = SimulatedMachine(predictor(), noise=0.02)
    found = find(tmp_path, other, asked="something else")
    assert len(found.visits) == len(other.visited)


@pytest.mark.slow
def test_a_run_that_was_interrupted_in_its_proof_knows_whom_it_compares(tmp_path):
    """Also one that was never raced, if there is no time to screen it again."""
    machine = SimulatedMachine(predictor(), noise=0.05)
    machine.interrupt_after = 14
    with pytest.raises(KeyboardInterrupt):
        find(tmp_path, machine, given=(), budget_s=40.0)
    again = SimulatedMachine(predictor(), noise=0.05, seed=100)
    again.look_s = 0.1
    found = find(tmp_path, again, given=(), budget_s=40.0)
    compared = {each.candidate for each in found.visits if each.stage == "proof"}
    assert found.winner in compared | {DEFAULT}


def test_what_two_candidates_share_is_learnt_of_both():
    candidates = [DEFAULT, quantized("int8"), quantized("int8").changed("max_num_seqs", 8)]
    belief = Belief(candidates, [0.0, 0.5, 0.6], {"quantization": 0.4})
    before = belief.estimate(candidates[2])
    belief.observe({candidates[1]: 0.0})
    after = belief.estimate(candidates[2])
    assert before.mean == 0.6
    assert after.mean < 0.2
    assert after.deviation < before.deviation
    assert belief.estimate(DEFAULT).deviation == 0.0


def test_a_turn_tells_its_candidates_apart_whatever_the_default_did_in_it():
    """A default that was slow once makes both look better, and neither beside the other."""
    one, other = quantized("int8"), quantized("int4")
    differences = []
    for turns in ([{one: 0.5, other: 0.3}], [{one: 0.5}, {other: 0.3}]):
        belief = Belief([DEFAULT, one, other], [0.0, 0.0, 0.0], {"quantization": 0.2})
        for turn in turns:
            belief.observe(turn)
        differences.append(belief.estimate(one).mean - belief.estimate(other).mean)
    assert 0.2 > differences[0] > 1.1 * differences[1] > 0


def test_a_change_that_adds_next_to_nothing_is_left_out():
    one, other = quantized("int4"), quantized("int8")
    drafted, wider = (
        one.changed(*each) for each in (("speculation", "draft"), ("max_num_seqs", 8))
    )
    known = [DEFAULT, one, other, drafted, wider]
    belief = Belief(known, [0.0, 0.30, 0.33, 0.31, 0.33], {})
    assert belief.simplest(drafted, known) == one
    assert belief.simplest(drafted, [drafted]) == drafted
    assert belief.simplest(wider, known) == wider
    assert belief.simplest(one, known) == one


def test_the_risk_is_that_of_what_was_chosen():
    one = quantized("int4")
    belief = Belief([DEFAULT, one], [0.0, 0.5], {"quantization": 0.1})
    assert belief.risk([True, True]) == belief.risk([True, True], 1) < 0.01
    assert belief.risk([True, True], 0) > 0.99


def test_the_noise_of_a_proof_is_that_of_all_its_visits():
    """Least squares with a level for each of three turns and an effect of the candidate leave 5
    degrees of freedom, where three pairs leave 2."""
    turns = [
        {"default": [0.00, 0.04], "fast": [0.21]},
        {"default": [0.52, 0.48], "fast": [0.74]},
        {"default": [0.11, 0.08], "fast": [0.28]},
    ]
    found = ratios_over("default", turns)["fast"]
    rows, logs = [], []
    for number, turn in enumerate(turns):
        for setting, values in turn.items():
            for value in values:
                rows.append([number == 0, number == 1, number == 2, setting == "fast"])
                logs.append(value)
    design = np.array(rows, dtype=float)
    solution, (squares,), *_ = np.linalg.lstsq(design, np.array(logs), rcond=None)
    error = (squares / 5 * np.linalg.inv(design.T @ design)[3, 3]) ** 0.5
    assert log(found.value) == pytest.approx(solution[3])
    assert log(found.high) == pytest.approx(solution[3] + 2.571 * error)
    assert found.num_turns == 3


def test_the_interval_of_pairs_is_students():
    # R: t.test(c(0.1, 0.2, 0.15, 0.05))$conf.int is 0.02229 to 0.22771.
    ratio = paired_ratio([0.1, 0.2, 0.15, 0.05])
    assert (ratio.low, ratio.high) == pytest.approx((exp(0.02229), exp(0.22771)), abs=2e-4)
