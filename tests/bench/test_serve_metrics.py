"""Arithmetic on recorded requests, against numbers computed by hand."""

import random

import numpy as np
import pytest

from ridgeline.bench.serve.metrics import (
    RequestTrace,
    Slo,
    distribution,
    littles_law,
    quantile,
    summarize,
)
from ridgeline.roofline.metrics import percentile


def trace(scheduled_s, *times_s, sent_s=None, tokens=None, **fields):
    fields = {"num_prompt_tokens": 10} | fields
    return RequestTrace(
        scheduled_s=scheduled_s,
        sent_s=scheduled_s if sent_s is None else sent_s,
        finished_s=max(times_s, default=scheduled_s),
        chunk_times_s=times_s,
        chunk_tokens=tokens or (1,) * len(times_s),
        **fields,
    )


def test_one_request_by_hand():
    """Due at 10, sent at 10.5; 1 token at 11, 2 at 11.2, 1 at 12."""
    each = trace(10.0, 11.0, 11.2, 12.0, sent_s=10.5, tokens=(1, 2, 1))
    assert each.num_output_tokens == 4
    assert each.ttft_s == pytest.approx(1.0)  # from the schedule, not from the sending
    assert each.end_to_end_s == pytest.approx(2.0)
    assert each.tpot_s == pytest.approx(1.0 / 3)
    assert each.stall_s == pytest.approx(0.8)
    assert each.token_gaps_s() == pytest.approx([0.1, 0.1, 0.8])


def test_requests_of_one_token_have_no_tpot_and_are_counted():
    summary = summarize([trace(0.0, 1.0), trace(0.0, 1.0, 2.0)])
    assert summary.num_single_token == 1
    assert summary.tpot_s.count == 1
    assert summary.tpot_s.mean == pytest.approx(1.0)


def test_the_mean_hides_what_percentiles_show():
    """The published example: mean 390 ms, although nine of ten are at most 110 ms."""
    values = [100, 102, 100, 100, 99, 104, 110, 90, 3000, 95]
    sample = distribution([value / 1e3 for value in values])
    assert sample.mean == pytest.approx(0.390)
    assert sample.p50.value == pytest.approx(0.100)
    assert sorted(values)[8] == 110
    assert sample.p90.value == pytest.approx(0.110 + 0.1 * (3.000 - 0.110))
    assert sample.p99 is None


def test_goodput_is_what_meets_every_limit():
    """The published example: 100 requests a minute, of which 30 meet both limits: 30 a minute."""
    good = [trace(0.6 * i, 0.6 * i + 0.1, 0.6 * i + 0.2) for i in range(30)]
    slow_start = [trace(0.6 * i, 0.6 * i + 0.3, 0.6 * i + 0.4) for i in range(30, 60)]
    slow_tokens = [trace(0.6 * i, 0.6 * i + 0.1, 0.6 * i + 0.4) for i in range(60, 90)]
    failed = [trace(0.6 * i, error="timeout") for i in range(90, 99)]
    last = trace(59.4, 59.9, 60.0)  # the wall is a minute
    summary = summarize(
        [*good, *slow_start, *slow_tokens, *failed, last], Slo(ttft_s=0.2, tpot_s=0.12)
    )
    assert summary.num_requests == 100
    assert summary.wall_s == pytest.approx(60.0)
    assert 60 * summary.request_rate == pytest.approx(100.0)
    assert 60 * summary.goodput == pytest.approx(30.0)
    assert summary.good_share == pytest.approx(0.30)
    assert 60 * summary.completed_rate == pytest.approx(91.0)
    assert summary.num_failed == 9


def test_rates_by_hand():
    traces = [trace(0.0, 1.0, 2.0, num_cached_tokens=4), trace(1.0, 2.0, 3.0, 4.0)]
    summary = summarize(traces)
    assert summary.wall_s == pytest.approx(4.0)
    assert summary.output_tokens_s == pytest.approx(5 / 4)
    assert summary.input_tokens_s == pytest.approx(20 / 4)
    assert summary.cached_share == pytest.approx(4 / 20)
    assert summary.mean_concurrency == pytest.approx((2 + 3) / 4)
    assert summary.user_tokens_s.mean == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99])
def test_percentiles_are_those_of_numpy(share):
    rng = random.Random(1)
    values = sorted(rng.expovariate(1) for _ in range(137))
    assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_intervals_cover_the_true_percentile_about_as_often_as_they_say():
    rng = random.Random(2)
    covered = 0
    for _ in range(600):
        interval = quantile(sorted(rng.random() for _ in range(200)), 0.9)
        covered += interval.low <= 0.9 <= interval.high
    assert 0.92 <= covered / 600 <= 0.98


def test_an_interval_that_the_sample_cannot_give_is_none():
    interval = quantile([1.0, 2.0, 3.0], 0.95)
    assert interval.high is None
    assert interval.low is not None


def test_p99_needs_a_thousand_samples():
    assert distribution([1.0] * 999).p99 is None
    assert distribution([1.0] * 1000).p99.value == 1.0


def test_littles_law_holds_in_a_steady_run_and_fails_in_an_overloaded_one():
    steady = [trace(0.1 * i, 0.1 * i + 0.5) for i in range(1000)]
    law = littles_law(steady)
    assert law.concurrency == pytest.approx(5.0, rel=0.02)
    assert law.is_steady
    growing = [trace(0.1 * i, 0.1 * i + 0.02 * i) for i in range(1000)]
    assert not littles_law(growing).is_steady
    assert littles_law(steady[:10]) is None


def test_a_run_that_failed_altogether():
    summary = summarize([trace(0.0, error="refused", sent_s=0.0), trace(1.0, error="refused")])
    assert summary.num_failed == 2
    assert summary.first_error == "refused"
    assert summary.ttft_s is None
    assert summary.goodput == 0
