"""The simulated and the real executor lead the real scheduler to the same plans, step by step."""

import random

import pytest
import torch
from tests.tiny import CONFIG, WINDOWED, tiny_model

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import FLOAT32
from ridgeline.core.plan import ModelRole
from ridgeline.executors import create_executor
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.planning.simulation import make_loop, run_arrivals
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.scheduler.pricing import LinearPrice

PRICE = LinearPrice(pass_s=2e-3, token_s=1e-4, pair_s=1e-7)


class _Timed:
    """A real executor on the virtual clock: its tokens, the price's seconds."""

    def __init__(self, executor, clock):
        self._executor, self._clock, self._free_s = executor, clock, 0.0

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def submit(self, plan):
        self._free_s = max(self._free_s, self._clock()) + PRICE.seconds(plan)
        return _TimedHandle(self._executor.submit(plan), self._clock, self._free_s)


class _TimedHandle:
    def __init__(self, handle, clock, done_s):
        self._handle, self._clock, self._done_s = handle, clock, done_s

    def __getattr__(self, name):
        return getattr(self._handle, name)

    def result(self):
        self._clock.advance_to(self._done_s)
        return self._handle.result()


class _Recorded:
    """Notes what each plan decides: everything but the tokens' values."""

    def __init__(self, executor):
        self._executor, self.decisions = executor, []

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def submit(self, plan):
        segments = [
            (s.slot, s.start, s.stop, s.num_drafts, s.block_updates, s.outputs)
            for a_pass in plan.passes
            for s in a_pass.segments
        ]
        admitted = [(a.slot, len(a.token_ids)) for a in plan.admissions]
        self.decisions.append((plan.step_id, segments, admitted, plan.releases, plan.copies))
        return self._executor.submit(plan)


def trace(seed):
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(30):
        now += rng.expovariate(120)
        arrivals.append(
            Arrival(
                arrival_s=now,
                prompt_tokens=rng.choice([3, 20, 60]),
                output_tokens=rng.randint(1, 25),
            )
        )
    return arrivals


def decisions(executor, clock, arrivals, **settings):
    recorded = _Recorded(executor)
    config = EngineConfig(
        max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100, block_tokens=4, **settings
    )
    per_token = sum(recorded.kv_layout().block_bytes) / 4
    loop, scheduler = make_loop(recorded, config, clock, price=PRICE, kv_pool_bytes=140 * per_token)
    answers = run_arrivals(loop, scheduler, arrivals, clock)
    return recorded.decisions, [answer.timings for answer in answers], scheduler.num_preemptions


@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"tpot_slo_s": 0.006}, {"scheduling_policy": "edf"}, {"batching": "static"}],
    ids=["fcfs", "slo", "edf", "static"],
)
def test_same_decisions(config, settings):
    arrivals = trace(7)
    model = tiny_model(config, dtype=torch.float32)
    clock = VirtualClock()
    real = create_executor("reference", {ModelRole.TARGET: model}, block_tokens=4)
    expected = decisions(_Timed(real, clock), clock, arrivals, **settings)
    real.close()
    priced = PricedModel(spec=model.spec, ops=model.ops, activations=FLOAT32)
    clock = VirtualClock()
    simulated = SimulatedExecutor({ModelRole.TARGET: priced}, PRICE, clock, block_tokens=4)
    found = decisions(simulated, clock, arrivals, **settings)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == theirs
    assert found[1] == expected[1]
    assert len(found[0]) > 60


def test_the_trace_makes_the_scheduler_preempt():
    priced_model = tiny_model(CONFIG, dtype=torch.float32)
    priced = PricedModel(spec=priced_model.spec, ops=priced_model.ops, activations=FLOAT32)
    clock = VirtualClock()
    simulated = SimulatedExecutor({ModelRole.TARGET: priced}, PRICE, clock, block_tokens=4)
    assert decisions(simulated, clock, trace(7))[2] > 0
