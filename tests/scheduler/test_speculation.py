"""Drafts in the plan: outputs are as without, blocks come back, limits hold."""

import random
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tests.fakes import FakeExecutor, next_token
from tests.scheduler.test_scheduler import CONFIG, expected_output, request, run, run_ahead

from ridgeline.core.config import blocks_per_sequence
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter
from ridgeline.core.request import FinishReason
from ridgeline.core.rounding import ceil_div
from ridgeline.scheduler import (
    DraftModel,
    DraftModelConfig,
    Scheduler,
    SchedulerConfig,
    Speculation,
)
from ridgeline.scheduler import speculation as speculation_module


class Oracle(Drafter):
    """Proposes what the fake target says, with some tokens wrong; or asks for the draft model."""

    is_tree = False

    def __init__(self, rng: random.Random, *, wrong=0.3, model=False, window=1000) -> None:
        self._rng, self._wrong, self._model, self._window = rng, wrong, model, window
        self.tokens: dict[int, list[int]] = {}
        self.outcomes: list[tuple[int, int]] = []

    def start(self, slot, token_ids, namespace=None, *, tenant="", draw=GREEDY_DRAW):
        assert slot not in self.tokens
        self.tokens[slot] = list(token_ids)

    def extend(self, slot, token_ids):
        self.tokens[slot] += token_ids

    def finish(self, slot):
        del self.tokens[slot]

    def verified(self, slot, draft, accepted):
        nodes = [-1, *accepted]
        parents = draft.parents or range(-1, len(draft.token_ids) - 1)
        assert [parents[node] for node in accepted] == nodes[:-1]
        self.outcomes.append((draft.num_steps, len(accepted)))

    def propose(self, slot, max_tokens):
        count = self._rng.randint(0, max_tokens)
        if self._model:
            return Draft(num_model_tokens=count, is_tree=self.is_tree)
        tokens = list(self.tokens[slot])
        for _ in range(count):
            right = next_token(tokens[-self._window :])
            tokens.append(right if self._rng.random() > self._wrong else 5)
        return Draft(token_ids=tuple(tokens[len(tokens) - count :]))


class Trees(Oracle):
    """Proposes trees of which one path may be right; a token may follow another twice."""

    is_tree = True

    def propose(self, slot, max_tokens):
        if self._model:
            return super().propose(slot, max_tokens)
        tokens, parents = [], []
        for _ in range(self._rng.randint(0, max_tokens)):
            parent = self._rng.randint(-1, len(tokens) - 1)
            path, node = [], parent
            while node >= 0:
                path.append(tokens[node])
                node = parents[node]
            right = next_token([*self.tokens[slot], *reversed(path)][-self._window :])
            tokens.append(right if self._rng.random() > self._wrong else 5)
            parents.append(parent)
        return Draft(token_ids=tuple(tokens), parents=tuple(parents))


class Resting(Oracle):
    """Drafts nothing for some steps now and then, of which the scheduler makes what it likes."""

    def __init__(self, rng, **settings):
        super().__init__(rng, **settings)
        self._drafts = True
        self.rested = 0

    def begin_step(self, lengths):
        self._drafts = self._rng.random() < 0.5

    def rest_steps(self):
        steps = 0 if self._drafts else self._rng.randint(0, 6)
        self.rested += steps
        return steps

    def propose(self, slot, max_tokens):
        return super().propose(slot, max_tokens) if self._drafts else Draft()


def make(
    drafter,
    *,
    max_tokens=4,
    draft_blocks=None,
    only_chains=False,
    clock=time.monotonic,
    **changes,
) -> Scheduler:
    settings = {**CONFIG, **changes}
    settings.setdefault("windows", (None,) * len(settings["num_blocks"]))
    draft_model = None
    if draft_blocks is not None:
        draft_model = DraftModel(
            DraftModelConfig(
                num_blocks=(draft_blocks,) * len(settings["windows"]),
                windows=settings["windows"],
                block_tokens=settings["block_tokens"],
                max_pass_tokens=settings["max_num_batched_tokens"],
                max_model_len=settings["max_model_len"],
                kv_ttl_s=settings.get("kv_ttl_s"),
            )
        )
    speculation = Speculation(
        drafter=drafter, max_tokens=max_tokens, draft_model=draft_model, only_chains=only_chains
    )
    return Scheduler(SchedulerConfig(**settings), speculation, clock=clock)


@pytest.mark.parametrize("model", [False, True], ids=["host", "draft model"])
@pytest.mark.parametrize(
    ("kind", "windows", "states"),
    [
        *(
            (kind, windows, ())
            for kind in (Oracle, Resting, Trees)
            for windows in ((None,), (9,), (None, 5, 17))
        ),
        *((kind, (None,), (states,)) for kind in (Oracle, Resting) for states in (3, 30)),
    ],
)
@pytest.mark.parametrize("seed", range(15))
def test_random_workloads_under_preemption(seed, windows, states, model, kind):
    """A drafter that rests lets steps be planned ahead, and be repeated. A state takes in what is
    known, and what was accepted with the next step."""
    rng = random.Random(seed)
    window = 1000 if None in windows else max(windows)
    drafter = kind(rng, model=model, window=window)
    scheduler = make(
        drafter,
        num_blocks=(18,) * len(windows) + states,
        draft_blocks=rng.choice([9, 40]) if model else None,
        windows=windows,
        max_num_batched_tokens=rng.choice([3, 7, 64]),
        max_tokens=rng.choice([1, 3, 8]),
        replay_s=10.0,
    )
    executor = FakeExecutor(windows=windows, has_states=bool(states))
    drive = run_ahead if kind is Resting else run
    common = [rng.randrange(1000) for _ in range(40)]
    pending = [
        request(
            0,
            common[: rng.randint(0, 40)] + [rng.randrange(1000) for _ in range(rng.randint(1, 10))],
            cache_key=rng.choice([b"tenant a", b"tenant b", None]),
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.choice([1, 2, 5, 30, None]),
        )
        for number in range(8)
    ]
    # One seed for all, since the drafter guesses with it.
    pending = [replace(each, request_id=number) for number, each in enumerate(pending)]
    sequences, aborted = [], set()

    def each_step():
        if pending and rng.random() < 0.5:
            sequences.extend(scheduler.add(pending.pop(0)))
        if sequences and rng.random() < 0.02:
            victim = rng.choice(sequences)
            if not victim.is_finished:
                aborted.add(victim)
                scheduler.finish(victim, FinishReason.ABORT)
                aborted.update(s for s in sequences if s.finish_reason is FinishReason.ABORT)

    while pending or scheduler.has_work:
        each_step()
        drive(scheduler, executor, each_step=each_step)
    if kind is Resting:
        assert drafter.rested > 0
    for sequence in sequences:
        expected = expected_output(sequence.request, sequence.sample_index, 64, window)
        if sequence in aborted:
            expected = expected[: sequence.num_output_tokens]
        assert sequence.output_token_ids == expected
        assert all(
            a <= d
            for a, d in zip(sequence.drafts.accepted_at, sequence.drafts.drafted_at, strict=True)
        )
    assert not drafter.tokens
    if scheduler.config.max_num_batched_tokens == 64 and kind is not Resting:
        assert sum(accepted for _, accepted in drafter.outcomes) > 0
    if kind is Trees and not (model and scheduler.config.max_num_batched_tokens < 64):
        assert any(s.parents for plan in executor.plans for s in plan.passes[-1].segments)
    if model and not (kind is Resting and states and seed == 1):  # which chance never asks
        roles = {a_pass.role for plan in executor.plans for a_pass in plan.passes}
        assert ModelRole.DRAFT in roles


@pytest.mark.parametrize("windows", [(None,), (9,)], ids=str)
def test_where_the_draft_model_has_no_token_nothing_is_lost(windows):
    """Its chain ends early, and the target's segment, which brought blocks, is void."""
    for seed in range(8):
        rng = random.Random(seed)
        drafter = Oracle(rng, model=True, window=windows[0] or 1000)
        scheduler = make(drafter, num_blocks=(40,), draft_blocks=40, windows=windows)
        executor = FakeExecutor(windows=windows)
        executor.may_be_void = True
        executor.shorten = lambda most, rng=rng: rng.randint(1, most)
        sequences = [
            sequence
            for number in range(4)
            for sequence in scheduler.add(request(number, range(rng.randint(1, 20)), max_tokens=30))
        ]
        run(scheduler, executor)
        for sequence in sequences:
            expected = expected_output(sequence.request, 0, 64, windows[0] or 1000)
            assert sequence.output_token_ids == expected


def test_right_drafts_save_steps_and_are_counted():
    class Right(Oracle):
        def propose(self, slot, max_tokens):
            tokens = list(self.tokens[slot])
            for _ in range(max_tokens):
                tokens.append(next_token(tokens))
            return Draft(token_ids=tuple(tokens[len(self.tokens[slot]) :]))

    scheduler, executor = make(Right(random.Random(0)), max_tokens=4), FakeExecutor()
    (sequence,) = scheduler.add(request(0, range(6), max_tokens=15))
    assert run(scheduler, executor) == 3
    assert sequence.drafts.drafted_at == sequence.drafts.accepted_at == [3, 3, 3, 3]
    assert sequence.drafts.drafted_by_rank == sequence.drafts.accepted_by_rank == [12]
    assert sequence.drafts.num_drafts == scheduler.speculation.figures().num_drafts == 3
    assert [segment.num_drafts for plan in executor.plans for segment in plan.passes[0].segments]


TREE = Draft(token_ids=(1, 2, 3, 4, 5), parents=(-1, -1, 1, 0, 2))  # 1-4 and 2-3-5


def test_a_tree_is_as_long_as_its_longest_path_and_is_cut_from_its_end():
    assert TREE.num_steps == 3
    assert TREE.cut(4) == Draft(token_ids=(1, 2, 3, 4), parents=(-1, -1, 1, 0))
    assert (TREE.cut(4).num_steps, TREE.cut(1).num_steps) == (2, 1)
    assert TREE.first_path() == Draft(token_ids=(1, 4))
    chain = Draft(token_ids=(7, 8))
    assert (chain.num_steps, chain.first_path(), chain.cut(5)) == (2, chain, chain)


def test_trees_are_counted_by_depth():
    class Branching(Oracle):
        """A wrong token and what would be right after it, beside two that are right."""

        def propose(self, slot, max_tokens):
            first = next_token(self.tokens[slot])
            second = next_token([*self.tokens[slot], first])
            wrong = (first + 1) % 1000
            return Draft(token_ids=(wrong, first, 5, second), parents=(-1, -1, 0, 1)).cut(
                max_tokens
            )

    drafter = Branching(random.Random(0))
    scheduler, executor = make(drafter, max_tokens=4), FakeExecutor()
    (sequence,) = scheduler.add(request(0, range(6), max_tokens=17))
    assert run(scheduler, executor) == 7  # the last two have room for one draft, and for none
    assert sequence.output_token_ids == expected_output(sequence.request, 0, 64)
    assert (sequence.drafts.drafted_at, sequence.drafts.accepted_at) == ([6, 5], [5, 5])
    assert drafter.outcomes == [(2, 2)] * 5 + [(1, 0)]
    figures = scheduler.speculation.figures()
    assert (figures.drafted_at, figures.accepted_at) == ((6, 5), (5, 5))
    assert (figures.num_drafts, sequence.drafts.num_drafts) == (6, 6)


@pytest.mark.parametrize("draft_blocks", [None, 40])
@pytest.mark.parametrize("only_chains", [False, True])
def test_trees_are_cut_to_chains_where_these_alone_can_be_verified(draft_blocks, only_chains):
    drafter = Trees(random.Random(0), model=draft_blocks is not None)
    scheduler = make(drafter, draft_blocks=draft_blocks, only_chains=only_chains)
    executor = FakeExecutor()
    (sequence,) = scheduler.add(request(0, range(6), max_tokens=30))
    run(scheduler, executor)
    assert sequence.output_token_ids == expected_output(sequence.request, 0, 64)
    segments = [segment for plan in executor.plans for segment in plan.passes[-1].segments]
    assert any(segment.num_drafts for segment in segments)
    assert any(segment.parents for segment in segments) is not only_chains


class Wrong(Oracle):
    """As many drafts as there is room for, all of them wrong, once ``after`` sequences run."""

    after = 1

    def propose(self, slot, max_tokens):
        if len(self.tokens) < self.after:
            return Draft()
        return Draft(token_ids=((next_token(self.tokens[slot]) + 1) % 1000,) * max_tokens)


def test_drafts_leave_a_token_for_each_sequence_that_comes_later():
    drafter = Wrong(random.Random(0))
    drafter.after = 3
    scheduler, executor = make(drafter, max_tokens=8, max_num_batched_tokens=8), FakeExecutor()
    for number in range(3):
        scheduler.add(request(number, range(2), max_tokens=12))
    run(scheduler, executor)
    passes = [plan.passes[0] for plan in executor.plans]
    first = [len(a_pass.segments) for a_pass in passes].index(3)
    decodes = passes[first + 1 : first + 9]
    assert {len(a_pass.segments) for a_pass in decodes} == {3}
    assert {a_pass.num_tokens for a_pass in decodes} == {8}  # and no budget is left unused


def test_blocks_of_rejected_drafts_are_given_back_at_once():
    scheduler = make(Wrong(random.Random(0)), max_tokens=8)
    scheduler.add(request(0, range(6), max_tokens=20))
    (sequence,) = scheduler.add(request(1, range(7), max_tokens=20))
    (pool,) = scheduler.prefix_cache.pools
    seen = set()

    def each_step():
        running = scheduler._lifecycle.running
        needed = sum(ceil_div(len(each.token_ids), 4) for each in running)
        assert pool.num_blocks - pool.num_free == needed
        seen.add(len(running))

    run(scheduler, FakeExecutor(), each_step=each_step)
    assert 2 in seen
    assert sum(sequence.drafts.accepted_at) == 0 < sum(sequence.drafts.drafted_at)


def test_the_end_within_an_accepted_run_cuts_it():
    outputs = expected_output(request(0, range(6), max_tokens=20), 0, 64)
    for place in range(20):
        if outputs.index(outputs[place]) != place:
            continue
        drafter = Oracle(random.Random(place), wrong=0.0)
        scheduler, executor = make(drafter, max_tokens=8, max_model_len=64), FakeExecutor()
        params = {"max_tokens": 20, "stop_token_ids": (outputs[place],)}
        (sequence,) = scheduler.add(request(0, range(6), **params))
        run(scheduler, executor)
        assert sequence.output_token_ids == outputs[: place + 1]
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.stop_reason == outputs[place]


def test_a_draft_model_behind_a_window_gives_blocks_up_while_it_catches_up():
    """It is asked again for each chunk of a long prompt, until it can propose."""
    windows, most = (9,), 0
    drafter = Oracle(random.Random(0), model=True, window=9)
    scheduler = make(
        drafter, num_blocks=(64,), draft_blocks=64, windows=windows, max_num_batched_tokens=8
    )
    draft_pool = scheduler.speculation._draft_model.prefix_cache.pools[0]
    scheduler.add(request(0, range(50), cache_key=b"k", max_tokens=None))

    def each_step():
        nonlocal most
        most = max(most, draft_pool.num_blocks - draft_pool.num_free)

    run(scheduler, FakeExecutor(windows=windows), each_step=each_step)
    needed = blocks_per_sequence(64, 9, block_tokens=4)
    assert 0 < most <= needed


def test_deleting_a_tenant_frees_the_draft_models_blocks_too():
    rng = random.Random(0)
    scheduler = make(Oracle(rng, model=True), draft_blocks=40)
    executor = FakeExecutor()
    for number, tenant in enumerate("ab"):
        prompt = [rng.randrange(1000) for _ in range(30)]
        plain = request(number, prompt, cache_key=tenant.encode(), max_tokens=20)
        scheduler.add(replace(plain, tenant=tenant))
    run(scheduler, executor)
    cache = scheduler.speculation._draft_model.prefix_cache
    before = cache.pools[0].num_cached
    scheduler.delete_tenant("a")
    assert 0 < cache.pools[0].num_cached < before
    scheduler.delete_tenant("b")
    assert cache.pools[0].num_cached == 0
    scheduler.check_integrity()


def test_cached_kv_of_both_models_expires_while_nothing_runs():
    time_is = SimpleNamespace(now_s=0.0)
    drafter = Oracle(random.Random(0), model=True)
    scheduler = make(drafter, draft_blocks=40, kv_ttl_s=10.0, clock=lambda: time_is.now_s)
    scheduler.add(request(0, range(30), cache_key=b"k", max_tokens=20))
    run(scheduler, FakeExecutor())
    draft_cache = scheduler.speculation._draft_model.prefix_cache
    pools = (*scheduler.prefix_cache.pools, *draft_cache.pools)
    for time_is.now_s, is_kept in ((9.0, True), (11.0, False)):
        scheduler.idle()
        assert all(bool(pool.num_cached) is is_kept for pool in pools)
    scheduler.check_integrity()


@pytest.mark.parametrize("drive", [run, run_ahead])
def test_costly_masks_take_turns_and_delay_no_plain_sequence(drive, monkeypatch):
    """20 outputs under one regex made another key's token wait for all of their masks."""
    clock_s, step_s, costs_s = [0.0], [0.0], []

    def masks(drafts, _):
        clock_s[0] += 0.003
        step_s[0] += 0.003
        return np.full((1 + len(drafts), 4), 0xFFFFFFFF, dtype=np.uint32)

    constraint = SimpleNamespace(
        advance=lambda _: None,
        forced=lambda _: (),
        valid=lambda tokens, _: range(len(tokens)),
        masks=masks,
        is_complete=False,
    )
    constraints = SimpleNamespace(prepare=lambda _: lambda: constraint)
    monkeypatch.setattr(speculation_module, "thread_time", lambda: clock_s[0])
    config = SchedulerConfig(**CONFIG | {"max_num_seqs": 13, "windows": (None,)})
    scheduler = Scheduler(config, speculation=Speculation(constraints=constraints))
    schedule = scheduler.schedule

    def plan():
        step_s[0] = 0.0
        found = schedule()
        if found is not None:
            scheduler.speculation.masks(found)
            costs_s.append(step_s[0])
        return found

    monkeypatch.setattr(scheduler, "schedule", plan)
    (plain,) = scheduler.add(request(0, range(6), max_tokens=40))
    costly = {"structured_outputs": {"regex": "a"}, "max_tokens": 5}
    add = partial(scheduler.add, grammar=lambda: constraint)
    masked = [s for n in range(1, 13) for s in add(request(n, range(6), **costly))]
    drive(scheduler, FakeExecutor())
    assert all(each.num_output_tokens == 5 for each in masked)
    assert plain.output_token_ids == expected_output(plain.request, 0, 64)
    entered = 12 * 6 // 16 + 2  # steps with prompts: what their masks cost is not known yet
    assert max(costs_s[entered:]) <= 0.0061, costs_s
