"""The price that is put together from its parts is the price."""

import random
import tracemalloc
from dataclasses import replace

import pytest
from msgspec import structs
from tests.planning.questions import CATALOGUE, model
from tests.tiny import CONFIG, EXPERTS, LATENT, WINDOWED

from ridgeline.core.kv_compression import KVWindow
from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole, Outputs, Pass, Segment, StepPlan
from ridgeline.models import describe, lower
from ridgeline.planning import catalogue_machine
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.features import SEGMENT, SEQUENCE
from ridgeline.roofline.predict import StepPredictor
from ridgeline.roofline.separable import SeparablePredictor


def plans(count):
    """Steps of decodes, prompts, both, decodes that are replayed, and drafts that are verified."""
    rng = random.Random(7)
    sample, nothing = Outputs(sample=True), Outputs()
    for number in range(count):
        decodes = rng.randint(0 if number % 3 else 1, 40)
        bounds = [(start, start + 1) for start in (rng.randint(1, 3000) for _ in range(decodes))]
        num_steps = rng.randint(1, 6) if number % 3 == 0 else 1
        if num_steps == 1:
            most = 12 if number % 4 == 1 else 800
            prompts = [
                (rng.randint(0, 900), rng.randint(2, most)) for _ in range(rng.randint(1, 3))
            ]
            bounds += [(start, start + length) for start, length in prompts]
        segments = tuple(
            Segment(slot, start, stop, (1,) * (stop - start),
                    outputs=sample if rng.random() < 0.8 or num_steps > 1 else nothing,
                    num_drafts=stop - start - 1 if number % 8 == 1 else 0)
            for slot, (start, stop) in enumerate(bounds)
        )  # fmt: skip
        yield StepPlan(step_id=number, passes=(Pass(segments=segments, num_steps=num_steps),))


STATES = CONFIG | {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
}


def tiny(config, **changes):
    spec = describe(config).spec
    return PricedModel(spec=spec, ops=lower(spec), **changes)


def predictors(priced):
    models = {ModelRole.TARGET: priced}
    calibration = catalogue_machine(CATALOGUE, "l4").calibration
    coefficients = {**calibration.coefficients, SEQUENCE: 3e-6, SEGMENT: 1e-7}
    calibration = structs.replace(calibration, coefficients=coefficients, level=1.1)
    return StepPredictor(models, calibration), SeparablePredictor(models, calibration)


@pytest.mark.parametrize(
    "priced",
    [
        (model("qwen2.5-0.5b"), tiny(EXPERTS), tiny(CONFIG, dense_attention=True)),
        (
            tiny(WINDOWED),
            tiny(LATENT),
            tiny(CONFIG, layout=ParallelLayout(context=2)),
            tiny(STATES),
        ),
    ],
    ids=["by parts", "as a whole"],
)
def test_seconds_are_those_of_the_whole(priced):
    for each in priced:
        whole, parts = predictors(each)
        for plan in plans(60):
            assert parts.seconds(plan) == pytest.approx(whole.seconds(plan), rel=1e-9)


def test_steps_of_decodes_and_prompts_are_not_priced_as_a_whole(monkeypatch):
    _, parts = predictors(tiny(CONFIG))
    priced = []
    monkeypatch.setattr(StepPredictor, "seconds", lambda *given: priced.append(given[1]) or 0.0)
    drafted = [
        plan
        for plan in plans(60)
        if any(1 < each.num_tokens <= 8 or each.num_drafts for each in plan.passes[0].segments)
    ]
    for plan in plans(60):
        parts.seconds(plan)
    assert priced == drafted != []
    assert len(drafted) < 30


@pytest.mark.parametrize(
    "fields",
    [
        {"window": KVWindow(2, 9)},
        {"outputs": Outputs(sample=True, logits=True)},
        {"outputs": Outputs(prompt_logprobs=True)},
        {"reuses": (KVReuse(first=0, start=4, stop=12, blocks=((0,),)),)},
    ],
)
def test_what_a_segment_adds_is_priced(fields):
    """Windows, logits of all positions and K and V that are taken over."""
    whole, parts = predictors(tiny(CONFIG))
    segment = Segment(0, 20, 40, (1,) * 20, outputs=Outputs(sample=True))
    plain, other = (
        StepPlan(step_id=1, passes=(Pass(segments=(each,)),))
        for each in (segment, segment._replace(**fields))
    )
    assert parts.seconds(other) == whole.seconds(other) != parts.seconds(plain)


def test_adapters_and_a_draft_models_passes_are_priced():
    priced = tiny(CONFIG, adapter_elements=(10_000,))
    target = Pass(segments=(Segment(0, 20, 21, (1,), outputs=Outputs(sample=True)),))
    whole, parts = predictors(priced)
    for each in (whole, parts):
        each.models[ModelRole.DRAFT] = tiny(WINDOWED)
    alone = StepPlan(step_id=1, passes=(target,))
    drafted = StepPlan(step_id=1, passes=(replace(target, role=ModelRole.DRAFT), target))
    draft = StepPlan(step_id=1, passes=(replace(target, role=ModelRole.DRAFT),))
    assert parts.seconds(alone, {0: 1}) == whole.seconds(alone, {0: 1}) > parts.seconds(alone)
    for plan in (drafted, draft):
        assert parts.seconds(plan) == whole.seconds(plan)


def test_what_is_kept_of_prices_takes_little_memory():
    """A server meets thousands of shapes of steps in hours, and has room for no more in minutes."""
    predictor = StepPredictor(
        {ModelRole.TARGET: model("qwen2.5-0.5b")}, catalogue_machine(CATALOGUE, "l4").calibration
    )
    tracemalloc.start()
    for tokens in range(1, 1500):
        predictor.batch_seconds(make_batch([(0, tokens)]))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2.5 * 2**20
