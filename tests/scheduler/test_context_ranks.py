"""Pools that ranks share by runs of tokens: all sequences end, each table is in turn."""

import random

import pytest
from tests.scheduler.simulation import Simulation, make_request

from ridgeline.core.context_ranks import context_blocks
from ridgeline.core.rounding import ceil_div

LONGEST = 1500


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_end_in_a_small_pool(num_ranks, seed, monkeypatch):
    rng = random.Random(seed)
    least = context_blocks(ceil_div(LONGEST, 16), num_ranks, 16)
    simulation = Simulation(
        num_blocks=(least + num_ranks * rng.choice([0, 8, 20]),), max_model_len=LONGEST,
        context_ranks=num_ranks, replay_s=0.5,
    )  # fmt: skip
    scheduler, schedule = simulation.scheduler, simulation.scheduler.schedule
    (pool,) = scheduler.prefix_cache.pools

    def checked():
        plan = schedule()
        for sequence in scheduler._lifecycle.running:
            (table,) = sequence.kv.tables
            assert pool.num_in_turn(table) == len(table)
        if plan is None or plan.step_id % 16 == 0:
            scheduler.check_integrity()
        return plan

    monkeypatch.setattr(scheduler, "schedule", checked)
    texts = [[rng.randrange(90) for _ in range(LONGEST)] for _ in range(3)]
    requests = [
        make_request(
            number, rng.random(), output=rng.randint(50, 200),
            prompt_token_ids=tuple(rng.choice(texts)[: rng.choice([20, 300, 700, 1000])])
            + (number % 90,) * rng.randint(1, 30),
            cache_key=b"x",
        )
        for number in range(40)
    ]  # fmt: skip
    records = simulation.run(requests)
    assert len(records) == len(requests)
    assert all(len(record.times) == record.request.params.max_tokens for record in records)
    assert scheduler.num_preemptions > 0 < scheduler.prefix_cache.stats.hit_tokens
