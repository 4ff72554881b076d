"""Rounding to grids: against brute force, textbook GPTQ and the promise to be no worse than RTN."""

import pytest
import torch

from ridgeline.compress.gptq import round_gptq, round_nearest, round_weighted
from ridgeline.compress.grids import FactoredIntegers, Integers, mxfp4
from ridgeline.compress.hessian import Curvature, InputSum

GRIDS = [
    *(FactoredIntegers(bits=bits) for bits in (2, 3, 4)),
    *(Integers(bits=bits, group_size=64) for bits in range(2, 9)),
    Integers(bits=4, group_size=32, symmetric=False),
    Integers(bits=2, group_size=16, symmetric=False),
    Integers(bits=3, group_size=256),
    mxfp4(),
]


def problem(seed=0, rows=48, columns=256, tokens=600):
    """Weights, and inputs that depend on each other and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 0.02
    x = torch.randn(tokens, columns // 2, generator=generator)
    x = x @ torch.randn(columns // 2, columns, generator=generator)
    return w, x * torch.rand(columns, generator=generator)


def curvature_of(x):
    total = InputSum(x.shape[1])
    for part in x.split(100):
        total.add(part)
    return Curvature.of(total.take())


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_gptq_changes_outputs_less_than_the_nearest_points(grid):
    w, x = problem()
    curvature = curvature_of(x)
    nearest, found = (each(w, grid, curvature) for each in (round_nearest, round_gptq))
    errors = [((w - each.values_OI) @ x.T).square().sum().item() for each in (nearest, found)]
    assert errors[1] < 0.6 * errors[0]
    assert found.error < 0.6 * found.nearest_error == pytest.approx(0.6 * nearest.error, rel=1e-5)
    for each in (nearest, found):  # codes and steps are all that a file has
        spread = each.steps.spread(torch.arange(256), grid.group_size)
        assert torch.equal(grid.values(each.codes_OI, *spread), each.values_OI)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_steps_for_the_inputs_at_hand_are_never_worse_than_those_for_any(grid):
    """A row takes them if its outputs change less, and is rounded to the nearest all the same."""
    w, x = problem()
    curvature = curvature_of(x)
    nearest, found = (each(w, grid, curvature) for each in (round_nearest, round_weighted))
    rows = [curvature.error(w - each.values_OI) for each in (nearest, found)]
    assert torch.all(rows[1] <= rows[0])
    assert found.error < nearest.error
    spread = found.steps.spread(torch.arange(256), grid.group_size)
    assert torch.equal(grid.codes(w, *spread), found.codes_OI)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_codes_are_the_nearest_points(grid):
    w, x = problem(rows=5)
    found = round_nearest(w, grid, curvature_of(x))
    scales, offsets = found.steps.spread(torch.arange(256), grid.group_size)
    is_signed = isinstance(grid, FactoredIntegers) or getattr(grid, "symmetric", False)
    low = -(1 << (grid.bits - 1)) if is_signed else 0
    points = [
        grid.values(torch.full(w.shape, low + code), scales, offsets)
        for code in range(1 << grid.bits)
    ]
    least = (torch.stack(points) - w).abs().amin(0)
    torch.testing.assert_close((found.values_OI - w).abs(), least, rtol=1e-4, atol=1e-8)


def test_the_sweep_of_gptq_is_the_textbooks():
    """Column by column with the whole inverse, as the paper's equations (2) and (3)."""
    w, x = problem(rows=6, columns=32, tokens=400)
    grid, curvature = Integers(bits=3, group_size=32), curvature_of(x)
    from ridgeline.compress.gptq import _compensated

    steps = grid.fit(w, curvature.hessian_II.diagonal())
    scales, _ = steps.spread(curvature.order_I, 32)
    codes = _compensated(w[:, curvature.order_I], grid, scales, None, curvature.factor_II)
    left, order = w[:, curvature.order_I].double(), curvature.order_I
    hessian = curvature.hessian_II.double()[order][:, order]
    wanted = torch.empty(codes.shape, dtype=torch.int16)
    for column in range(32):
        inverse = hessian[column:, column:].inverse()
        wanted[:, column] = grid.codes(left[:, column].float(), scales[:, column], None)
        value = wanted[:, column] * scales[:, column]
        error = (left[:, column] - value) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_it_is_never_worse_than_rounding_however_little_was_seen(seed, tokens):
    w, x = problem(seed, tokens=max(tokens, 1))
    curvature = curvature_of(x[:tokens])
    found = round_gptq(w, FactoredIntegers(bits=4), curvature)
    nearest = round_nearest(w, FactoredIntegers(bits=4), curvature)
    rows = [curvature.error(w - each.values_OI) for each in (found, nearest)]
    assert (rows[0] <= rows[1] * (1 + 1e-5)).all()
    assert found.values_OI.isfinite().all()


def test_dead_inputs_are_counted_and_their_weights_rounded():
    w, x = problem()
    x[:, 7] = 0
    curvature = curvature_of(x)
    found = round_gptq(w, FactoredIntegers(bits=4), curvature)
    assert curvature.num_dead == 1
    step = found.steps.scales_OG[:, 0].abs()
    inside = w[:, 7].abs() < 7 * step
    assert ((found.values_OI - w)[:, 7].abs() <= step / 2 + 1e-7)[inside].all()


def test_rows_of_zeros_and_of_one_value():
    w, x = problem()
    w[3], w[4] = 0, 0.25
    for grid in GRIDS:
        found = round_gptq(w, grid, curvature_of(x))
        assert not found.values_OI[3].any()
        torch.testing.assert_close(found.values_OI[4], w[4], rtol=0.2, atol=0)


@pytest.mark.parametrize("bits", [3, 4])
def test_factored_scales_are_small_multiples_of_one(bits):
    w, _ = problem()
    scales = FactoredIntegers(bits=bits).fit(w, torch.ones(256)).scales_OG.double()
    assert torch.equal(scales, scales.half().double())
    for four in scales.reshape(-1, 4) * 2.0**24:
        common = torch.tensor(0).gcd(four.long()[0])
        for value in four.long()[1:]:
            common = common.gcd(value)
        assert (four / common).abs().max() <= 16


def test_rows_are_rounded_some_at_a_time_and_in_place(monkeypatch):
    w, x = problem(rows=1300, columns=64)
    grid, curvature = FactoredIntegers(bits=4), curvature_of(x)
    whole = round_gptq(w, grid, curvature)
    monkeypatch.setattr("ridgeline.compress.gptq.rows_at_once", lambda _: 100)
    again = w.clone()
    found = round_gptq(again, grid, curvature, out_OI=again)
    assert found.values_OI is again
    assert torch.equal(again, whole.values_OI)
    assert torch.equal(found.codes_OI, whole.codes_OI)
    assert torch.equal(found.steps.scales_OG, whole.steps.scales_OG)
