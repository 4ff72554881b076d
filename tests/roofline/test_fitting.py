"""The fit finds what generated the samples; calibrations survive the disk and refuse nonsense."""

import json
import random
from dataclasses import replace

import msgspec
import pytest

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.formats import BFLOAT16, FLOAT32, number_format
from ridgeline.core.host import cpu_name, usable_cores
from ridgeline.core.ops import MoE
from ridgeline.core.plan import ModelRole
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import Question, answer, catalogue_machine
from ridgeline.roofline import PricedModel, decode_batch, prefill_batch
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.calibration import calibrate, load, measured_elsewhere, save, typical
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel
from ridgeline.roofline.features import Overlap, pass_terms, roof_seconds
from ridgeline.roofline.fitting import Sample, fit, overlap_seconds, predict
from ridgeline.roofline.kernels import NativeKernels, PlainKernels
from ridgeline.roofline.predict import Bound, StepPredictor

CEILINGS = Ceilings(
    name="test",
    levels=(
        MemoryLevel(name="L3", size_bytes=32e6, bytes_per_s=60e9),
        MemoryLevel(name="DRAM", size_bytes=64e9, bytes_per_s=20e9),
    ),
    flops_per_s={"float32": 100e9, "bfloat16": 200e9},
    measured=True,
)
BATCHES = [
    *((decode_batch(b, c), "decode") for b in (1, 2, 4, 8, 16, 32) for c in (64, 700, 3000)),
    *((prefill_batch(n), "prefill") for n in (16, 64, 200, 500, 2000)),
]
TRUTH = {
    "step": 1e-4,
    "op": 5e-6,
    "segment": 2e-6,
    "sequence": 1e-5,
    "row": 1e-5,
    "other": 1.5,
    "stream": 1.3,
    "unpack": 1.8,
    "product": 1.4,
    "fill": 40.0,
    "attention/read": 2.0,
    "attention/load": 1.1,
    "attention/product": 1.6,
    "overlap/float": 3.0,
    "overlap/codes": 0.3,
    "overlap/attention": 1.0,
}
KERNELS = NativeKernels(panel_tokens=4, attention_rows=6, in_16_bits=True)


def priced(name, form=FLOAT32, **changes):
    spec = describe(dict(PRESETS[name])).spec
    return PricedModel(spec=spec, ops=lower(spec), activations=form, **changes)


def truth(terms):
    return predict(TRUTH, terms)


def samples(names=("qwen2.5-0.5b", "gpt2", "qwen3-0.6b"), noise=0.0, forms=(FLOAT32, BFLOAT16)):
    rng = random.Random(0)
    found = []
    for name in names:
        for form in forms:
            for batch, phase in BATCHES:
                terms = pass_terms(priced(name, form), batch, CEILINGS)
                seconds = truth(terms) * (1 + rng.gauss(0, noise))
                found.append(
                    Sample(terms=terms, seconds=seconds, shape=name, format=form.name, phase=phase)
                )
    return found


def test_an_unseen_shape_is_predicted():
    coefficients = fit(samples())
    for batch, _ in BATCHES:
        terms = pass_terms(priced("llama-3.2-1b"), batch, CEILINGS)
        assert predict(coefficients, terms) == pytest.approx(truth(terms), rel=0.08)


def test_what_generated_the_steps_is_found():
    found = fit(samples())
    for name in ("stream/float/bfloat16", "product/float/float32", "attention/read"):
        expected = TRUTH.get(name, TRUTH.get(name.partition("/")[0]))
        assert found[name] == pytest.approx(expected, rel=0.1)


def test_steps_that_a_neighbour_disturbed_count_little():
    rng = random.Random(3)
    disturbed = [
        replace(sample, seconds=sample.seconds * (2.5 if rng.random() < 0.2 else 1.0))
        for sample in samples(noise=0.02)
    ]
    coefficients = fit(disturbed)
    for batch, _ in BATCHES:
        terms = pass_terms(priced("llama-3.2-1b"), batch, CEILINGS)
        assert predict(coefficients, terms) == pytest.approx(truth(terms), rel=0.15)


def test_a_format_never_measured_is_predicted_by_its_family():
    """From int8's steps, int4's: other bytes, and other instructions for each of them."""

    def model(name, form):
        return priced(name, weights=number_format(form), kernels=KERNELS)

    def measured(name, form):
        found = []
        for batch, phase in BATCHES:
            terms = pass_terms(model(name, form), batch, CEILINGS)
            found.append(
                Sample(terms=terms, seconds=truth(terms), shape=name, format=form, phase=phase)
            )
        return found

    coefficients = fit(measured("qwen2.5-0.5b", "int8") + measured("qwen3-0.6b", "int8"))
    for sample in measured("llama-3.2-1b", "int4"):
        assert predict(coefficients, sample.terms) == pytest.approx(sample.seconds, rel=0.15)


def test_panels_cost_by_steps():
    """A weight is unpacked once for four tokens; the first panel alone waits for memory."""
    model = priced("llama-3.2-1b", weights=number_format("int4"), kernels=KERNELS)
    cost = {**dict.fromkeys(TRUTH, 0.0), "unpack": 1.0}
    seconds = {
        tokens: predict(cost, pass_terms(model, decode_batch(tokens, 64), CEILINGS))
        for tokens in (1, 4, 5, 8, 9)
    }
    assert seconds[4] == pytest.approx(seconds[1])
    assert seconds[8] == pytest.approx(seconds[5]) == pytest.approx(2 * seconds[1])
    assert seconds[9] == pytest.approx(3 * seconds[1])


def test_an_overlap_is_between_the_longer_side_and_the_sum():
    both = Overlap("k", {"read": 3.0}, {"compute": 4.0})
    assert overlap_seconds({"overlap/k": 1e3}, both) == pytest.approx(4.0)
    assert overlap_seconds({"overlap/k": 0.0}, both) == pytest.approx(7.0)
    assert overlap_seconds({"overlap/k": 1.0}, both) == pytest.approx(5.0)


def test_the_roof_is_below_what_is_predicted():
    for batch, _ in BATCHES:
        model = priced("llama-3.2-1b")
        roof = roof_seconds(model, batch, CEILINGS)
        assert 0 < roof < predict(TRUTH, pass_terms(model, batch, CEILINGS))


def test_intervals_cover_what_they_say():
    calibration = calibrate(samples(noise=0.1), CEILINGS, executor="test", dense_attention=False)
    predictor = StepPredictor({ModelRole.TARGET: priced("llama-3.2-1b")}, calibration)
    rng = random.Random(1)
    inside = []
    for batch, phase in BATCHES * 20:
        measured = truth(predictor.terms(batch)) * (1 + rng.gauss(0, 0.1))
        interval = predictor.interval(predictor.batch_seconds(batch), phase)
        inside.append(interval.low_s <= measured <= interval.high_s)
    assert 0.7 <= sum(inside) / len(inside) <= 0.95


def test_a_file_keeps_everything(tmp_path):
    calibration = calibrate(samples(), CEILINGS, executor="test", dense_attention=True)
    save(calibration, tmp_path / "a" / "calibration.json")
    assert load(tmp_path / "a" / "calibration.json") == calibration
    assert load(tmp_path / "missing.json") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [],
        lambda value: value | {"surprise": 1},
        lambda value: value | {"coefficients": {"step": -1}},
        lambda value: value | {"spreads": {}},
        lambda value: {key: value[key] for key in value if key != "ceilings"},
        lambda value: value | {"ceilings": value["ceilings"] | {"levels": []}},
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, change):
    path = tmp_path / "calibration.json"
    save(calibrate(samples(("gpt2",)), CEILINGS, executor="t", dense_attention=True), path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CorruptFileError):
        load(path)


@pytest.mark.parametrize("schema", [2, 99])
def test_another_version_is_as_good_as_none(tmp_path, schema):
    """2 counted other instructions, and had one interval for all formats."""
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"schema": schema}))
    assert load(path) is None


def test_bounds():
    h100 = CEILINGS.__class__(
        name="H100",
        levels=(MemoryLevel(name="memory", size_bytes=80e9, bytes_per_s=3.35e12),),
        flops_per_s={"bfloat16": 989e12},
    )
    predictor = StepPredictor({ModelRole.TARGET: priced("llama-3.1-8b", BFLOAT16)}, typical(h100))
    assert predictor.bound(decode_batch(1, 1000)) is Bound.MEMORY
    assert predictor.bound(prefill_batch(2048)) is Bound.COMPUTE


@pytest.mark.parametrize("context", [1000, 30_000])
def test_a_plan_gives_the_tpot_that_typical_efficiencies_reproduce(context):
    """Published: 6.44 ms + 4.37e-5 ms for each token of context. They were chosen by it."""
    asked = Question(
        model=priced("llama-3.1-8b", BFLOAT16),
        machine=catalogue_machine(load_catalogue(), "h100"),
        prompt_tokens=context - 10,
        output_tokens=20,
    )
    published_s = 6.44e-3 + 4.37e-8 * context
    assert answer(asked).alone_tpot_s == pytest.approx(published_s, rel=0.05)


def test_marginal_seconds_follow_the_whole():
    calibration = calibrate(samples(), CEILINGS, executor="t", dense_attention=False)
    predictor = StepPredictor({ModelRole.TARGET: priced("llama-3.2-1b")}, calibration)
    ten = predictor.segment_seconds(10, 0)
    assert 0 < ten < predictor.segment_seconds(200, 0) < predictor.segment_seconds(200, 3000)
    alone = predictor.batch_seconds(prefill_batch(300))
    assert predictor.segment_seconds(300, 0) <= alone
    for count, start in ((700, 3000), (5000, 1000)):
        whole = predictor.batch_seconds(prefill_batch(count, start=start))
        assert predictor.segment_seconds(count, start) == pytest.approx(whole, rel=0.1)
    step_s, most = predictor.batch_seconds, predictor.models[ModelRole.TARGET].spec.max_position
    for start in (4096, most):  # contexts that are priced
        added_s = step_s(make_batch([(0, 1), (start, start + 512)])) - step_s(make_batch([(0, 1)]))
        assert predictor.segment_seconds(512, start) == pytest.approx(added_s)


def test_formats_that_were_not_measured_have_an_interval_of_their_own():
    """Steps of bfloat16 take twice what those of float32 foretell, and shapes agree with each
    other: only a format that was never met is doubtful."""
    measured = [
        replace(each, seconds=each.seconds * (2.0 if each.format == "bfloat16" else 1.0))
        for each in samples(noise=0.01)
    ]
    found = calibrate(measured, CEILINGS, executor="t", dense_attention=False)
    for phase in ("prefill", "decode"):
        seen, new = (found.spread(phase, each) for each in (BFLOAT16, number_format("fp8")))
        assert 0.9 < seen.low < seen.high < 1.35
        assert new.low < 0.7
        assert new.high > 1.4
    asked = priced("llama-3.2-1b", BFLOAT16, weights=number_format("fp8"))
    plain, unseen = (
        StepPredictor({ModelRole.TARGET: each}, found).interval(1.0, "decode")
        for each in (priced("llama-3.2-1b", BFLOAT16), asked)
    )
    assert unseen.low_s < plain.low_s < plain.high_s < unseen.high_s


def test_one_shape_alone_has_intervals_too():
    for forms in ((FLOAT32,), (FLOAT32, BFLOAT16)):
        few = samples(("gpt2",), noise=0.05, forms=forms)
        found = calibrate(few, CEILINGS, executor="t", dense_attention=False)
        assert {"prefill", "decode"} <= found.spreads.keys()
        assert found.spreads["decode"].low < 1 < found.spreads["decode"].high


@pytest.mark.parametrize(("name", "some"), [("llama-3.2-1b", 1), ("mixtral-8x7b", 32)])
def test_a_step_is_what_its_segments_add(name, some):
    """And what it takes before anything is in it, which is more than nothing: decodes together do
    not read as many experts as each by itself."""
    predictor = StepPredictor(
        {ModelRole.TARGET: priced(name, BFLOAT16)},
        calibrate(samples(), CEILINGS, executor="t", dense_attention=False),
    )
    segment_s = predictor.segment_seconds

    def step_s(*ranges):
        return predictor.batch_seconds(make_batch(ranges))

    fixed_s = step_s(*[(99, 100)] * some) - some * segment_s(1, 99)
    assert fixed_s > 0
    for decodes in (some, 2 * some):
        for chunk in (128, 600):
            whole = step_s(*[(99, 100)] * decodes, (0, chunk))
            parts = fixed_s + decodes * segment_s(1, 99) + segment_s(chunk, 0)
            assert parts == pytest.approx(whole, rel=0.15)


def test_a_context_beyond_the_window_adds_nothing_more():
    window = 1024
    spec = describe(dict(PRESETS["mistral-7b"]) | {"sliding_window": window}).spec
    model = PricedModel(spec=spec, ops=lower(spec), activations=BFLOAT16)
    predictor = StepPredictor(
        {ModelRole.TARGET: model},
        calibrate(samples(), CEILINGS, executor="t", dense_attention=False),
    )
    at_window, beyond = (predictor.segment_seconds(512, c) for c in (window, 16 * window))
    assert beyond == pytest.approx(at_window, rel=0.02)
    assert predictor.segment_seconds(512, 0) < 0.98 * at_window


def test_experts_rows_are_padded_to_tiles_where_kernels_have_them():
    """8 tokens in Mixtral are 2 rows for each expert, and tensor cores are fed with 64."""
    plain, tiled = (
        priced("mixtral-8x7b", BFLOAT16, kernels=PlainKernels(expert_tile=tile)) for tile in (1, 64)
    )

    def product_s(model, tokens):
        terms = pass_terms(model, prefill_batch(tokens), CEILINGS)
        sides = (each.arithmetic for each in terms.overlaps)
        return sum(side.get("product/float/bfloat16", 0.0) for side in sides)

    assert product_s(tiled, 8) > 10 * product_s(plain, 8)
    assert product_s(tiled, 8192) == pytest.approx(product_s(plain, 8192), rel=0.02)
    assert product_s(tiled, 257) < 1.01 * product_s(tiled, 256)  # 64 rows for each, and a bit more


def test_experts_get_each_token_as_often_as_it_goes_to_one():
    """It is rearranged for every one of them, not once for all."""
    dense = replace(op_of(priced("mixtral-8x7b"), MoE).routing, top_k=1)
    model = priced("mixtral-8x7b")
    ops = tuple(replace(op, routing=dense) if isinstance(op, MoE) else op for op in model.ops)
    fills = [
        pass_terms(each, prefill_batch(64), CEILINGS).alone["fill/float"]
        for each in (replace(model, ops=ops), model)
    ]
    widths = op_of(model, MoE).gate.shape[1] + op_of(model, MoE).gate.shape[2]
    added = 32 * 64 * widths / (CEILINGS.flops_per_s["float32"] / 2)
    assert fills[1] - fills[0] == pytest.approx(added)


def test_what_a_network_makes_inside_is_rearranged_whatever_its_width():
    """Also where it is as wide as what goes in."""

    def fill_s(inner):
        spec = describe(dict(PRESETS["mixtral-8x7b"]) | {"intermediate_size": inner}).spec
        model = PricedModel(spec=spec, ops=lower(spec), activations=FLOAT32)
        return pass_terms(model, prefill_batch(64), CEILINGS).alone["fill/float"]

    hidden = dict(PRESETS["mixtral-8x7b"])["hidden_size"]
    one_more = fill_s(hidden + 1) - fill_s(hidden)
    assert one_more == pytest.approx(fill_s(hidden + 2) - fill_s(hidden + 1), rel=1e-3)


def test_each_expert_that_is_met_runs_ops_of_its_own():
    """The cpu executor takes one expert after another, a tuned engine all of them at once."""
    (grouped, short), (native, long) = (
        [
            pass_terms(priced("mixtral-8x7b", kernels=kernels), prefill_batch(n), CEILINGS).alone
            for n in (1, 512)
        ]
        for kernels in (PlainKernels(), KERNELS)
    )
    layers = len([op for op in priced("mixtral-8x7b").ops if isinstance(op, MoE)])
    assert grouped["op"] == short["op"]
    assert long["op"] - native["op"] == pytest.approx(layers * KERNELS.expert_ops * (8 - 2))


def test_experts_that_no_token_goes_to_have_their_share_of_the_caches():
    """A token's two experts of eight would fit; the next token's are others."""
    config = dict(PRESETS["mixtral-8x7b"]) | {
        "num_hidden_layers": 1,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 64,
    }
    reads = []
    for num_experts in (2, 8):
        spec = describe(config | {"num_local_experts": num_experts}).spec
        model = PricedModel(spec=spec, ops=lower(spec), activations=FLOAT32)
        overlaps = pass_terms(model, decode_batch(1, 8), CEILINGS).overlaps
        reads.append({name.split("/")[0] for each in overlaps for name in each.memory})
    assert reads == [{"near", "attention"}, {"stream", "attention"}]


def op_of(model, kind):
    return next(op for op in model.ops if isinstance(op, kind))


def test_only_weights_in_fp8_are_multiplied_in_it():
    """Neither attention nor a head of 16 bits."""
    ceilings = replace(CEILINGS, flops_per_s={"bfloat16": 1e12, "fp8": 2e12})
    fp8 = number_format("fp8")
    plain = priced("llama-3.1-8b", BFLOAT16)
    small = priced("llama-3.1-8b", BFLOAT16, weights=fp8, compute=fp8)

    def arithmetic(model):
        terms = pass_terms(model, prefill_batch(2000), ceilings)
        found = {}
        for overlap in terms.overlaps:
            for name, seconds in overlap.arithmetic.items():
                if name.split("/")[0] == "product" or overlap.kind == "attention":
                    found[name] = found.get(name, 0.0) + seconds
        return found

    before, after = arithmetic(plain), arithmetic(small)
    assert after["attention/product"] == before["attention/product"]
    head_s = after["product/float/bfloat16"]
    layers_s = before["product/float/bfloat16"] - head_s
    assert 0 < head_s < 0.01 * layers_s
    assert after["product/codes/fp8"] == pytest.approx(layers_s / 2)


def test_a_calibration_of_another_machine_is_known():
    made = calibrate(samples(), CEILINGS, executor="test", dense_attention=False)
    assert measured_elsewhere(made, "avx2") is None
    here = {"cpu": cpu_name(), "cores": usable_cores(), "kernels": "avx2"}

    def measured_on(**conditions):
        ceilings = replace(CEILINGS, conditions=here | conditions)
        return measured_elsewhere(msgspec.structs.replace(made, ceilings=ceilings), "avx2")

    assert measured_on() is None
    assert "is of Abacus with" in measured_on(cpu="Abacus")
    assert f"--calibrate -t {usable_cores()}`" in measured_on(cpu="Abacus")
    assert f"with {usable_cores() + 1} cores" in measured_on(cores=usable_cores() + 1)
    assert "avx512amx kernels" in measured_on(kernels="avx512amx")
