"""Passes of a few tokens, as drafts are verified in, as a machine measured them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.bench.calibration import SHAPES, STEPS, price_of, shape
from ridgeline.bench.step_timing import StepShape
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel
from ridgeline.roofline.features import pass_terms
from ridgeline.roofline.fitting import Sample, fit, predict
from ridgeline.roofline.kernels import NativeKernels

MEASURED = json.loads((Path(__file__).parent / "few_tokens.json").read_text(encoding="utf-8"))
KERNELS = NativeKernels(panel_tokens=8, attention_rows=12, in_16_bits=False, in_pairs=True, line=4)
UNSEEN = {"layers": shape(2048, 6144, 4, 16, 8, 4096), "head": shape(2048, 6144, 1, 16, 8, 151936)}


def priced_on_avx512(config, form):
    return replace(price_of(config, form, executor="cpu"), kernels=KERNELS)


def fitted(found, form):
    """What a machine's steps in a format say of it, and its ceilings."""
    levels = tuple(
        MemoryLevel(name=name, size_bytes=size, bytes_per_s=rate)
        for name, size, rate in found["levels"]
    )
    ceilings = Ceilings(name="Zen 4", levels=levels, flops_per_s=found["flops"])
    shapes = {name: shape(*sizes) for name, sizes in found.get("shapes", {}).items()}
    samples = []
    for name, seconds in found["seconds"].items():
        model = priced_on_avx512(shapes.get(name, SHAPES[name]), form)
        samples += [
            Sample(
                terms=pass_terms(model, step.batch, ceilings),
                seconds=each,
                shape=name,
                format=form,
                phase=step.phase,
            )
            for step, each in zip(STEPS, seconds, strict=True)
        ]
    return fit(samples), ceilings


@pytest.mark.parametrize(
    ("form", "part", "error"),
    [("int4", "layers", 0.14), ("int8", "layers", 0.07), ("int4", "head", 0.25)],
)
def test_products_of_a_few_tokens_hide_behind_the_reading_of_codes(form, part, error):
    """Of a head, too, whose codes have more bits than those of layers in int4. In int8 shapes were
    measured that calibrations no longer have; they stand beside their seconds."""
    found = MEASURED[form]
    coefficients, ceilings = fitted(found, form)
    model = priced_on_avx512(UNSEEN[part], form)
    predicted = []
    for number in range(4):
        step = StepShape(batch_size=1, num_tokens=1 + number, context=60, drafts=number)
        predicted.append(predict(coefficients, pass_terms(model, step.batch, ceilings)))
    measured = found["verification"][part]
    assert predicted == pytest.approx(measured, rel=error)
    assert [each / predicted[0] for each in predicted] == pytest.approx(
        [each / measured[0] for each in measured], rel=0.13
    )
