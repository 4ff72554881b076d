"""The price that is put together from its parts is the price."""

import random
import tracemalloc

import pytest
from tests.planning.questions import CATALOGUE, model

from ridgeline.core.plan import ModelRole, Outputs, Pass, Segment, StepPlan
from ridgeline.planning import catalogue_machine
from ridgeline.roofline.batch import make_batch
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


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.1-8b", "mixtral-8x7b", "gemma-2-2b"])
def test_seconds_are_those_of_the_whole(name):
    models = {ModelRole.TARGET: model(name)}
    calibration = catalogue_machine(CATALOGUE, "l4").calibration
    whole, parts = StepPredictor(models, calibration), SeparablePredictor(models, calibration)
    for plan in plans(60):
        assert parts.seconds(plan) == pytest.approx(whole.seconds(plan), rel=1e-9)


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
