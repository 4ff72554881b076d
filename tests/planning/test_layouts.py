"""Layouts beside each other: bytes that ranks really send, and arithmetic done by hand."""

from dataclasses import replace

import pytest
from tests.executors.rank_threads import Together, on_executor
from tests.executors.test_ranks import PROMPT, _model
from tests.planning.questions import question
from tests.tiny import CONFIG, EXPERTS

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.rounding import ceil_div
from ridgeline.executors.priced import priced_model
from ridgeline.planning import Network, Slo, compare_layouts
from ridgeline.planning.layouts import spread_model
from ridgeline.roofline.batch import decode_batch, make_batch, prefill_batch
from ridgeline.roofline.predict import Bound

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
NETWORK = Network(bytes_per_s=1e9, latency_s=1e-4)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (CONFIG, {"tensor": 2}),
        (CONFIG, {"pipeline": 3}),
        (CONFIG, {"tensor": 2, "pipeline": 2}),
        (EXPERTS, {"expert": 2, "pipeline": 2}),
        (EXPERTS, {"tensor": 2, "expert": 4}),
    ],
)
def test_the_bytes_of_a_layout_are_those_that_its_ranks_send(config, axes):
    model = _model(config | HEADS)
    asked = question(model=priced_model(model, "cpu"), hardware="h100", count=4)
    spread = spread_model(asked, ParallelLayout(**axes))
    together = Together(model, spread.layout)

    def run(driver):
        driver.start(0, PROMPT)
        driver.run(driver.segment(0, 13, [7]))

    on_executor(together, run)
    sent = sum(pipe.sent_bytes for pipe in together.pipes)
    if spread.layout.stage_ranks > 1:
        sent += sum(group.counts()[0] for group in together.groups)
    priced = [spread.sent_bytes(make_batch([span])) for span in ((0, 13), (13, 14))]
    assert sent == pytest.approx(sum(priced), rel=1e-9) != 0


def test_ranks_share_the_work_and_spend_the_time_of_their_exchanges():
    asked, batch = question("llama-3.1-8b", "h100", 8), decode_batch(16, 1000)
    one, four = (spread_model(asked, ParallelLayout(tensor=n)) for n in (1, 4))
    ceilings = asked.machine.calibration.ceilings
    rows = 16 * 2 * 3 / 4  # tokens, bytes of an element, and the ranks that get a quarter each
    layer = rows * (4096 + 4096 + 14336 + 4096)
    sent = 32 * layer + rows * 4096 + 16 * 4 * 3 / 4 * 128256
    calls = 4 * 32 + 2
    seconds = calls * ceilings.link_latency_s + sent / ceilings.link_bytes_per_s
    assert four.sent_bytes(batch) == pytest.approx(4 * sent)
    parts = four.predictors[0].parts(batch)
    assert parts[Bound.COMMUNICATION] == pytest.approx(four.seconds(batch).exchanged_s)
    coefficient = asked.machine.calibration.coefficients.get("link", 1.0)
    assert parts[Bound.COMMUNICATION] == pytest.approx(coefficient * seconds, rel=1e-6)
    assert one.seconds(batch).exchanged_s == 0.0
    computed = four.seconds(batch).whole_s - four.seconds(batch).exchanged_s
    assert 1 / 4 <= computed / one.seconds(batch).whole_s < 1 / 2


def test_stages_answer_as_fast_as_the_dearest_lets_them():
    asked = question("llama-3.1-8b", "h100", 2, prompt_tokens=6000, output_tokens=60)
    found = {each.options: each for each in compare_layouts(asked).predictions}
    spread = spread_model(asked, ParallelLayout(pipeline=2))
    chunks = [prefill_batch(min(2048, 6000 - start), start=start) for start in (0, 2048, 4096)]
    chunks = [replace(c, logit_rows=int(c is chunks[-1])) for c in chunks]
    steps = [spread.seconds(chunk) for chunk in chunks]
    ttft_s = steps[0].dearest_s + steps[1].dearest_s + steps[2].whole_s
    assert found["-pp 2"].ttft_s == pytest.approx(ttft_s)
    assert ttft_s < 0.7 * found["-dp 2"].ttft_s
    half = spread.seconds(decode_batch(ceil_div(found["-pp 2"].batch, 2), 6030))
    assert half.whole_s < found["-pp 2"].tpot_s == pytest.approx(2 * half.dearest_s)
    assert found["-pp 2"].alone_tpot_s == pytest.approx(
        spread.seconds(decode_batch(1, 6030)).whole_s
    )


def test_the_best_layout_meets_the_limits_if_any_does():
    asked = question("llama-3.1-8b", "h100", 8, prompt_tokens=1000, output_tokens=200)
    most = compare_layouts(asked)
    assert most.best.options == "-dp 8"
    assert most.fastest.options == "-tp 8"
    assert most.best.output_tok_s == max(each.output_tok_s for each in most.predictions)
    quick = compare_layouts(replace(asked, slo=Slo(tpot_s=0.005)))
    assert quick.best.layout.tensor > 1
    assert quick.best.meets_slo and quick.best.tpot_s <= 0.005
    assert not any(each.meets_slo for each in quick.predictions if each.layout.tensor == 1)
    none = compare_layouts(replace(asked, slo=Slo(tpot_s=1e-6)))
    assert none.best is not None and not none.best.meets_slo


def test_ranks_that_share_contexts_send_what_runs_of_kv_came_to():
    asked = question("llama-3.1-8b", "h100", 2, prompt_tokens=8000, output_tokens=200)
    found = {each.options: each for each in compare_layouts(asked).predictions}
    # Layers, heads, a maximum, a sum and a head's width, and 16 runs of 512 tokens.
    assert found["-cp 2"].sent_bytes == pytest.approx(32 * 32 * (2 + 128) * 4 * 16)
    assert found["-cp 2"].output_tok_s < found["-dp 2"].output_tok_s


def test_a_model_that_one_device_does_not_hold_is_spread():
    found = compare_layouts(question("llama-3.1-70b", "h100", 4))
    too_small = {each.options for each in found.predictions if not each.fits}
    assert too_small == {"-dp 4", "-cp 2 -dp 2", "-cp 4"}  # whose ranks have all weights
    assert found.best.layout.num_ranks > 1
    assert found.predictions[-1].to_json()["tpot_s"] is None
    nowhere = compare_layouts(question("llama-3.1-70b", "l4", 2))
    assert nowhere.best is nowhere.fastest is None


def test_stages_in_several_hosts_need_a_network_and_wait_for_it():
    asked = question("llama-3.1-70b", "h100", 16)
    layout = ParallelLayout(tensor=4, pipeline=4)
    with pytest.raises(InvalidRequestError, match="--network"):
        spread_model(asked, layout)
    far = spread_model(asked, layout, NETWORK)
    assert far.crossings == {1}
    near = spread_model(replace(asked, machine=replace(asked.machine, host_devices=16)), layout)
    batch = decode_batch(8, 1000)
    assert far.sent_bytes(batch) == near.sent_bytes(batch)
    over = 8 * 8192 * 2 * 4 / 1e9 + 1e-4
    link = near.seconds(batch).whole_s - far.seconds(batch).whole_s + over
    assert 0 < link < over  # what the host's own link would have taken
    refused = compare_layouts(question("llama-3.1-70b", "h100", 12), NETWORK).refused
    assert "-tp 3" in refused["Replicas of 3 devices do not fill hosts of 8."]


def test_a_model_that_cannot_be_split_so_says_why():
    [(why, options)] = compare_layouts(question("olmo-2-7b", "h100", 2)).refused.items()
    assert "go over all heads together" in why
    assert options == ["-tp 2"]
