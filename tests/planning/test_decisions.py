"""The simulated and the real executor lead the real scheduler to the same plans, step by step."""

import random

import pytest
from tests.tiny import CONFIG, WINDOWED, Driver, tiny_executor, tiny_model

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import FLOAT64
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter
from ridgeline.executors import create_executor
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.planning.simulation import make_loop, run_arrivals
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.scheduler import Speculation
from ridgeline.scheduler.prediction import LinearPredictor

PREDICTOR = LinearPredictor(pass_s=2e-3, token_s=1e-4, pair_s=1e-7)
PROMPTS = (3, 20, 60)
MAX_LEN = 100
ACCEPTANCE = 0.6
POOL_TOKENS = 140


class _Timed:
    """A real executor on the virtual clock: its tokens, the price's seconds."""

    def __init__(self, executor, clock):
        self._executor, self._clock, self._free_s = executor, clock, 0.0

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def submit(self, plan):
        self._free_s = max(self._free_s, self._clock()) + PREDICTOR.seconds(plan)
        return _TimedHandle(self._executor.submit(plan), self._clock, self._free_s)


class _TimedHandle:
    def __init__(self, handle, clock, done_s):
        self._handle, self._clock, self._done_s = handle, clock, done_s

    def __getattr__(self, name):
        return getattr(self._handle, name)

    def result(self):
        self._clock.advance_to(self._done_s)
        return self._handle.result()


class _Simulated(SimulatedExecutor):
    """Accepts drafts by their position alone, as `_Oracle` knows to propose them."""

    def _noise(self, admission, position, purpose):
        return noise(position) if purpose == 1 else super()._noise(admission, position, purpose)


class _Oracle(Drafter):
    """Drafts that the target will accept where ``noise`` says so, and refuse elsewhere.

    ``truth`` has what the target says after each prompt; without it any tokens do.
    """

    def __init__(self, truth=None):
        self._truth, self._tokens = truth, {}

    def start(self, slot, token_ids, namespace=None, *, tenant="", draw=GREEDY_DRAW):
        self._tokens[slot] = list(token_ids)

    def extend(self, slot, token_ids):
        self._tokens[slot] += token_ids

    def finish(self, slot):
        del self._tokens[slot]

    def propose(self, slot, max_tokens):
        known = self._tokens[slot]
        positions = range(len(known), min(len(known) + max_tokens, MAX_LEN))
        if self._truth is None:
            return Draft(token_ids=(1,) * len(positions))
        text = next(
            text
            for length, text in sorted(self._truth.items(), reverse=True)
            if length <= len(known) and text[: len(known)] == known
        )
        return Draft(
            token_ids=tuple(
                text[p] if noise(p) < ACCEPTANCE else (text[p] + 1) % CONFIG["vocab_size"]
                for p in positions
            )
        )


def noise(position):
    return random.Random(position).random()


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
        repeats = [a_pass.num_steps for a_pass in plan.passes]
        admitted = [(a.slot, len(a.token_ids)) for a in plan.admissions]
        self.decisions.append(
            (plan.step_id, segments, repeats, admitted, plan.releases, plan.copies)
        )
        return self._executor.submit(plan)

    @property
    def chunks(self):
        """Parts of prompts that were computed over several steps."""
        return sum(s[1] > 0 and s[2] - s[1] - s[3] > 1 for d in self.decisions for s in d[1])

    @property
    def drafts(self):
        return sum(s[3] for d in self.decisions for s in d[1])


def trace(seed):
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(30):
        now += rng.expovariate(120)
        arrivals.append(
            Arrival(
                arrival_s=now,
                prompt_tokens=rng.choice(PROMPTS),
                output_tokens=rng.randint(1, 25),
            )
        )
    return arrivals


def run(executor, clock, *, drafter=None, **settings):
    """Decisions, timings and preemptions of one trace."""
    recorded = _Recorded(executor)
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=MAX_LEN,
        block_tokens=4,
        **settings,
    )
    per_token = sum(recorded.kv_layout().block_bytes) / 4
    loop, scheduler = make_loop(
        recorded,
        config,
        clock,
        predictor=PREDICTOR,
        kv_pool_bytes=POOL_TOKENS * per_token,
        speculation=None if drafter is None else Speculation(drafter=drafter, max_tokens=3),
    )
    answers = run_arrivals(loop, scheduler, trace(7), clock)
    return recorded, [answer.timings for answer in answers], scheduler.num_preemptions


def greedy_texts(config):
    """What the model says after each prompt of the trace, as far as its context goes."""
    texts = {}
    for length in PROMPTS:
        driver = Driver(tiny_executor(model=tiny_model(config)), blocks_per_slot=32)
        prompt = [1] * length
        texts[length] = prompt + driver.decode(0, prompt, MAX_LEN - length)
    return texts


def simulated(config, drafter=None, **settings):
    model, clock = tiny_model(config), VirtualClock()
    priced = PricedModel(spec=model.spec, ops=model.ops, activations=FLOAT64)
    executor = _Simulated(
        {ModelRole.TARGET: priced}, PREDICTOR, clock, block_tokens=4, acceptance=ACCEPTANCE
    )
    return run(executor, clock, drafter=drafter, **settings)


def real(config, drafter=None, **settings):
    model, clock = tiny_model(config, dtype="float64"), VirtualClock()
    executor = create_executor(
        {ModelRole.TARGET: model}, EngineConfig(executor="reference", block_tokens=4)
    )
    result = run(_Timed(executor, clock), clock, drafter=drafter, **settings)
    executor.close()
    return result


def check_same(found, expected):
    for ours, theirs in zip(found[0].decisions, expected[0].decisions, strict=True):
        assert ours == theirs
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"tpot_slo_s": 0.006}, {"scheduling_policy": "edf"}, {"batching": "static"}],
    ids=["fcfs", "slo", "edf", "static"],
)
def test_same_decisions(config, settings):
    found = simulated(config, **settings)
    check_same(found, real(config, **settings))
    assert len(found[0].decisions) > 60


@pytest.mark.parametrize("settings", [{}, {"tpot_slo_s": 0.006}], ids=["fcfs", "slo"])
@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windowed"])
def test_same_decisions_with_drafts(config, settings):
    """Drafts are verified, in part refused, and given up under memory pressure."""
    found = simulated(config, _Oracle(), **settings)
    check_same(found, real(config, _Oracle(greedy_texts(config)), **settings))
    assert found[0].drafts > 100


def test_the_trace_chunks_and_preempts():
    recorded, _, num_preemptions = simulated(CONFIG)
    assert num_preemptions > 0
    assert recorded.chunks > 0
    _, _, num_preemptions = simulated(CONFIG, _Oracle())
    assert num_preemptions > 0
