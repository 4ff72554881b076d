"""Plans: against arithmetic that can be done by hand, and against queueing theory."""

import json
from dataclasses import replace

import msgspec
import pytest
from tests.planning.questions import CATALOGUE, model, question

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import BFLOAT16, FLOAT16, number_format
from ridgeline.planning import (
    Slo,
    answer,
    catalogue_machine,
)
from ridgeline.planning.replica import choose_replica, replica_choices, splits
from ridgeline.roofline.fitting import of_new_format
from ridgeline.roofline.memory import USABLE_SHARE, kv_bytes, weights_bytes


def test_a_model_that_does_not_fit_says_so_and_predicts_nothing():
    result = answer(question("llama-3.1-70b", "h100")).to_json()
    assert result["fits"] is False
    assert result["ttft_s"] is None
    assert result["weights_bytes"] == pytest.approx(141e9, rel=0.01)


def test_decode_cannot_beat_the_bandwidth():
    result = answer(question(prompt_tokens=1000)).to_json()
    floor = result["weights_bytes"] / 0.3e12
    assert floor < result["tpot_s"] < 1.5 * floor
    assert result["bound"] == {"prefill": "compute", "decode": "memory"}
    low, high = result["interval_80"]["tpot_s"]
    assert low < result["tpot_s"] < high
    assert json.loads(json.dumps(result)) == result


def test_a_format_that_was_not_measured_has_its_own_interval():
    asked = question(num_requests=4)
    calibration = asked.machine.calibration
    wide = msgspec.structs.replace(calibration.spreads["decode"], low=0.1, high=10.0)
    spreads = calibration.spreads | {of_new_format("decode"): wide}
    known = msgspec.structs.replace(calibration, spreads=spreads, formats=("bfloat16",))
    machine = replace(asked.machine, calibration=known)
    narrow, unseen = (
        answer(replace(asked, machine=machine, model=each)).to_json()["interval_80"]["tpot_s"]
        for each in (model("llama-3.1-8b"), model("llama-3.1-8b", weights=number_format("int4")))
    )
    assert narrow[1] / narrow[0] < 3
    assert unseen[1] / unseen[0] > 50


def test_quantized_weights_are_faster_and_leave_room():
    plain = answer(question()).to_json()
    small = answer(question(model=model("llama-3.1-8b", weights=number_format("int4")))).to_json()
    assert small["tpot_s"] < 0.5 * plain["tpot_s"]
    assert small["max_batch"] > 2 * plain["max_batch"]


def test_devices_share_a_model_only_when_they_must():
    result = answer(question("llama-3.1-70b", "h100", 8, prompt_tokens=4000)).to_json()
    assert (result["tensor_parallel"], result["replicas"]) == (4, 2)
    two, chosen = (
        choose_replica(question("llama-3.1-70b", "h100", 8, prompt_tokens=1000, tensor=tensor))
        for tensor in (2, None)
    )
    assert 16 < two.fit.max_batch < 64 <= chosen.fit.max_batch
    assert chosen.model.layout.tensor == 4
    with pytest.raises(InvalidRequestError, match="does not divide"):
        answer(question("llama-3.1-70b", "h100", 8, tensor=3))
    with pytest.raises(InvalidRequestError, match="exchange"):
        answer(question("llama-3.1-8b", "m4-max", 2, tensor=2))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(InvalidRequestError, match="context"):
        answer(question("gpt2", prompt_tokens=1000, output_tokens=100))


@pytest.mark.parametrize("share", [0.9, 1.0, 1.25, 1.5, 2.0, 2.5])
def test_what_fits_behind_a_window_is_what_the_engine_takes(share):
    """Memory for so many times the window: if the plan says that it fits, the engine starts."""
    windowed = model("mistral-7b")
    machine = catalogue_machine(CATALOGUE, "l4")
    room = weights_bytes(windowed) + share * kv_bytes(windowed, windowed.spec.max_position)
    asked = question(model=windowed, prompt_tokens=12_000, output_tokens=20, num_requests=4)
    plan = answer(replace(asked, machine=replace(machine, memory_bytes=room / USABLE_SHARE)))
    assert plan.fits == plan.replica.fit.fits == (share > 1)


def test_what_is_no_gpu_is_priced_as_one_and_says_so():
    assert answer(question("qwen2.5-0.5b", "h100")).notes == []
    (note,) = answer(question("qwen2.5-0.5b", "xeon-8480")).to_json()["notes"]
    assert "is a CPU, of which the efficiencies of tuned GPU engines are assumed" in note
    (note,) = answer(question("qwen2.5-0.5b", "tpu-v5e")).to_json()["notes"]
    assert "No executor of ours runs there" in note


def test_bfloat16_is_slow_without_tensor_cores_that_have_it():
    slow, fast = (
        answer(question(model=model("qwen2.5-0.5b", activations=form), hardware="t4"))
        for form in (BFLOAT16, FLOAT16)
    )
    assert "--dtype float16 has 8 times as much" in slow.notes[0]
    assert fast.notes == []
    assert slow.alone_ttft_s > 3 * fast.alone_ttft_s


def test_weights_of_a_format_without_a_rate_are_multiplied_in_the_activations():
    """FP8 on a T4: in bfloat16, at float32's rate, not at that of float16."""
    fp8 = number_format("fp8")
    for form in (BFLOAT16, FLOAT16):
        asked = question(model=model("qwen2.5-0.5b", activations=form), hardware="t4")
        asked = replace(asked, prompt_tokens=1000, output_tokens=2)
        small = replace(asked, model=replace(asked.model, weights=fp8, compute=fp8))
        plain, packed = answer(asked), answer(small)
        assert packed.alone_ttft_s == pytest.approx(plain.alone_ttft_s, rel=0.05)
        assert packed.notes == plain.notes
    ada = replace(small, machine=catalogue_machine(CATALOGUE, "l4"))
    assert choose_replica(ada).model.compute == fp8


def test_bfloat16_is_called_slow_only_where_products_take_float32s_rate():
    asked = question("qwen2.5-0.5b", "t4")
    assert len(answer(asked).notes) == 1
    fp8 = number_format("fp8")
    packed = replace(asked.model, weights=fp8, compute=fp8)

    def notes(form=None, **changes):
        calibration = asked.machine.calibration
        roof = calibration.ceilings
        roof = replace(roof, measured=form == "measured", flops_per_s=roof.flops_per_s | changes)
        if form == "measured":
            assert msgspec.structs.replace(calibration, ceilings=roof).measured
        machine = replace(
            asked.machine, calibration=msgspec.structs.replace(calibration, ceilings=roof)
        )
        chosen = packed if form == "fp8" else asked.model
        return answer(replace(asked, machine=machine, model=chosen, output_tokens=2)).notes

    assert notes(bfloat16=60e12) == []  # a bit less than float16's 65
    assert not any("bfloat16" in note for note in notes("measured"))
    assert len(notes("fp8")) == 1
    assert notes("fp8", fp8=130e12) == []


def test_devices_without_a_link_hold_a_replica_each():
    asked = question("llama-3.1-8b", "m3-max", 2, prompt_tokens=20_000, output_tokens=2)
    found = choose_replica(asked)
    assert 0 < found.fit.max_batch < 64
    assert (found.model.layout.tensor, found.count) == (1, 2)
    assert len(replica_choices(replace(asked, slo=Slo(ttft_s=1.0)))) == 1
    with pytest.raises(InvalidRequestError, match="exchange"):
        choose_replica(replace(asked, tensor=2))
    large = answer(question("llama-3.1-70b", "m3-max", 2))
    assert not large.fits
    assert "how fast they exchange data is not known" in large.notes[-1]


def test_a_replica_stays_in_one_host_and_says_so():
    plan = answer(question("deepseek-v3", "h100", 16))
    assert not plan.fits
    (note,) = plan.to_json()["notes"]
    assert note.startswith("A replica is spread over 8 of the 16 devices at the most")
    assert answer(question("llama-3.1-70b", "h100")).notes == []


def test_the_datasheets_power_is_an_upper_bound():
    result = answer(question("llama-3.1-8b", "h100", 2)).to_json()
    assert result["power_w"] == 1400
    joules = result["joules_per_output_token_at_most"]
    assert joules * result["output_tok_s"] == pytest.approx(1400)
    unknown = answer(question("qwen2.5-0.5b", "tpu-v5e")).to_json()
    assert (unknown["power_w"], unknown["joules_per_output_token_at_most"]) == (None, None)


def test_there_is_no_tpot_of_one_token():
    result = answer(question(output_tokens=1)).to_json()
    assert result["ttft_s"] > 0
    assert {result[name] for name in ("tpot_s", "alone_tpot_s", "loaded_tpot_s")} == {None}
    assert result["interval_80"]["tpot_s"] is None


@pytest.mark.parametrize(
    ("prompt", "output", "low", "high"), [(2000, 4, 0.7, 1), (20, 200, 0, 0.2)]
)
def test_money_goes_where_the_time_goes(prompt, output, low, high):
    result = answer(question(prompt_tokens=prompt, output_tokens=output)).to_json()
    prices = result["usd_per_1m_by_phase"]
    spent = prices["input"] * result["input_tok_s"] * 3600 / 1e6
    rest = prices["output"] * result["output_tok_s"] * 3600 / 1e6
    assert spent + rest == pytest.approx(result["usd_per_hour"])
    assert low < spent / result["usd_per_hour"] < high


def test_ranks_share_whole_heads():
    """Of 14, each of 4 ranks has as many as the fullest; 15 ranks are one too many."""
    spec = model("qwen2.5-0.5b").spec  # 14 heads, 2 of K and V
    assert [n for n in range(1, 20) if splits(spec, n)] == list(range(1, 15))
    padded = choose_replica(question("qwen2.5-0.5b", "h100", 4, tensor=4)).model
    assert padded.spec.layers[0].attention.num_heads == 16


def test_copies_of_kv_heads_hold_no_more_sequences():
    wide = choose_replica(question("gemma-3-1b", "l4", 4, tensor=4))
    assert wide.kv_pool_bytes == wide.fit.kv_pool_bytes


def test_here_kv_has_the_share_that_an_engine_gives_it():
    asked = question(model=model("gpt2"))
    machine = replace(asked.machine, memory_bytes=2e9, kv_share=0.4)
    found = choose_replica(replace(asked, machine=machine)).fit
    assert found.kv_pool_bytes == pytest.approx(0.4 * (2e9 - weights_bytes(model("gpt2"))))


def test_twelve_devices_share_64_heads():
    """6 of them each, over at most 2 KV heads: no power of two."""
    asked = question("llama-3.1-70b", "inferentia2", 12, tensor=12)
    padded = choose_replica(asked).model
    attention = padded.spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads) == (72, 24)
    assert choose_replica(asked).fit.fits
    with pytest.raises(InvalidRequestError, match="cross hosts of 8"):
        choose_replica(question("llama-3.1-70b", "h100", 12, tensor=12))
