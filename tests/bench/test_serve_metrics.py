"""Arithmetic on recorded requests, against numbers computed by hand."""

import random

import numpy as np
import pytest

from ridgeline.bench.serve.costs import Prices, costs
from ridgeline.bench.serve.metrics import (
    RequestTrace,
    distribution,
    littles_law,
    quantile,
    summarize,
)
from ridgeline.core.errors import InvalidRequestError
from ridgeline.planning.cost import TokenPrices
from ridgeline.roofline.metrics import percentile
from ridgeline.roofline.slo import Slo, parse_slo
from ridgeline.roofline.utilization import Utilization


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


def test_an_answer_in_one_piece_has_no_speed_to_read_at():
    """A client that is busy reads all of it at once: a user was said to have 6,259,315 tok/s."""
    at_once = trace(0.0, 1.0, 1.0 + 1e-6, tokens=(1, 30))
    assert summarize([at_once]).user_tokens_s is None
    summary = summarize([at_once, trace(0.0, 1.0, 2.0)])
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


@pytest.mark.parametrize(
    ("count", "share", "ranks"),
    [(100, 0.5, (41, 60)), (200, 0.9, (172, 189)), (40, 0.95, (36, None))],
)
def test_the_ranks_of_an_interval_by_hand(count, share, ranks):
    """np ± 1.96 √(np(1−p)), both rounded up: 50 ± 9.8, 180 ± 8.32, 38 ± 2.7 of 40."""
    interval = quantile([float(rank) for rank in range(1, count + 1)], share)
    assert (interval.low, interval.high) == ranks


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


def test_what_is_offered_is_what_arrives_however_slow_the_answers_are():
    """Ten a second arrive for ten seconds; one a second is answered."""
    overloaded = summarize([trace(0.1 * i, 1.0 + i) for i in range(101)])
    assert overloaded.request_rate == pytest.approx(10.0)
    assert overloaded.completed_rate == pytest.approx(1.0)
    assert summarize([trace(0.0, 1.0)] * 3).request_rate is None  # all at once
    closed = summarize([trace(i, i + 1.0) for i in range(9)], is_open_loop=False)
    assert closed.request_rate is None
    assert closed.completed_rate == pytest.approx(1.0)


def test_a_user_waits_for_the_first_text_and_not_for_the_first_token():
    """Reasoning comes at 1, text at 3; another answer calls a tool, and shows nothing."""
    summary = summarize([trace(0.0, 1.0, 3.0, 4.0, published_s=3.0), trace(0.0, 1.0, 2.0)])
    assert summary.ttft_s.maximum == pytest.approx(1.0)
    assert summary.time_to_publish_s.count == 1
    assert summary.time_to_publish_s.p50.value == pytest.approx(3.0)
    assert summary.num_unpublished == 1


def test_ttft_is_told_by_input_length():
    traces = [trace(0.0, n / 100, num_prompt_tokens=n) for n in (10, 20, 30, 40) for _ in range(5)]
    parts = summarize(traces).ttft_by_input
    assert [(part.low, part.high) for part in parts] == [(10, 10), (20, 20), (30, 30), (40, 40)]
    assert [part.ttft_s.p50.value for part in parts] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    same = summarize([trace(0.0, 1.0, num_prompt_tokens=7)] * 9).ttft_by_input
    assert [(part.low, part.high, part.ttft_s.count) for part in same] == [(7, 7, 9)]


def test_the_preset_of_chats_is_the_published_one():
    """200 ms to the first token, and 120 ms for each of the others."""
    slo = parse_slo("chat")
    assert slo == parse_slo("ttft=0.2, tpot=0.12") == Slo(ttft_s=0.2, tpot_s=0.12)
    assert trace(0.0, 0.2, 0.32).is_good(slo)
    assert slo.missed(ttft_s=0.3, tpot_s=0.2, end_to_end_s=9.0) == ("ttft", "tpot")
    for wrong in ("", "talk", "ttft", "ttft=0", "ttft=1,ttft=2", "itl=1"):
        with pytest.raises(InvalidRequestError, match="preset"):
            parse_slo(wrong)


def test_costs_by_hand():
    """One request a second of 10 tokens in and 2 out, of which none is good in time."""
    summary = summarize([trace(i, i + 0.5, i + 1.0) for i in range(10)], Slo(ttft_s=0.1))
    rented = costs(summary, Prices(usd_per_hour=3.6), {})
    assert rented["usd_per_1m_output"] == pytest.approx(500.0)
    assert rented["usd_per_1k_requests"] == pytest.approx(1.0)
    assert rented["usd_per_1k_good"] is None
    api = costs(summary, Prices(tokens=TokenPrices(input=100.0, output=1000.0)), {})
    assert api["usd_per_1k_requests"] == pytest.approx(1e3 * (10 * 100 + 2 * 1000) / 1e6)
    use = {
        phase: Utilization(
            seconds=seconds, tokens=1, useful_flops=1.0, moved_bytes=1.0, mfu=None, mbu=None
        )
        for phase, seconds in (("prefill", 1.0), ("decode", 3.0))
    }
    split = costs(summary, Prices(usd_per_hour=3.6), use)["usd_per_1m_by_phase"]
    assert split == pytest.approx({"input": 25.0, "output": 375.0})
