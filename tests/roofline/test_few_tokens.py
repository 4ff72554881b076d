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
UNSEEN = shape(2048, 6144, 4, 16, 8, 4096)


def priced_on_avx512(config, form):
    return replace(price_of(config, form, executor="cpu"), kernels=KERNELS)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_products_of_a_few_tokens_hide_behind_the_reading_of_codes(form):
    found = MEASURED[form]
    levels = tuple(
        MemoryLevel(name=name, size_bytes=size, bytes_per_s=rate)
        for name, size, rate in found["levels"]
    )
    ceilings = Ceilings(name="Zen 4", levels=levels, flops_per_s=found["flops"])
    samples = []
    for name, seconds in found["seconds"].items():
        model = priced_on_avx512(SHAPES[name], form)
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
    coefficients, model = fit(samples), priced_on_avx512(UNSEEN, form)
    for number, seconds in enumerate(found["verification"]):
        step = StepShape(batch_size=1, num_tokens=1 + number, context=60, drafts=number)
        priced = predict(coefficients, pass_terms(model, step.batch, ceilings))
        assert priced == pytest.approx(seconds, rel=0.07)
