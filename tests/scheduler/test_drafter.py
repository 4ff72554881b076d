"""What a drafter is told: of sequences, of seconds, and of what became of its drafts."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import request, run
from tests.scheduler.test_speculation import Oracle, make

from ridgeline.core.plan import Segment
from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, TokenDraw
from ridgeline.core.result import SegmentResult
from ridgeline.kvcache import KVCacheManager, PrefixCache
from ridgeline.scheduler import Speculation
from ridgeline.scheduler.sequence import Sequence


def test_a_drafter_is_told_how_each_sample_is_drawn_and_what_is_expected():
    class Told(Oracle):
        def start(self, slot, token_ids, namespace=None, *, tenant="", draw=GREEDY_DRAW):
            super().start(slot, token_ids, namespace, tenant=tenant, draw=draw)
            told.append((namespace, tenant, draw))

        def expect(self, slot, token_ids):
            told.append(tuple(token_ids))

    told = []
    scheduler, executor = make(Told(random.Random(0))), FakeExecutor()
    drawn = request(7, range(6), n=2, temperature=0.7)
    greedy = request(8, range(6), temperature=0)
    for each in (
        replace(drawn, tenant="a", draft_namespace=b"of a"),
        replace(greedy, expected_token_ids=(9, 10)),
    ):
        scheduler.add(each)
        run(scheduler, executor)
    assert told == [
        *((b"of a", "a", TokenDraw(seed=7, sample_index=n, temperature=0.7)) for n in range(2)),
        (None, "", TokenDraw(seed=8, sample_index=0, temperature=0.0)),
        (4, 5, 9, 10),
    ]


def test_a_step_that_waits_for_drafts_takes_what_the_host_does_between_steps():
    """As steps that are planned ahead do; what comes after a pause without work does not count."""

    class Timed(Oracle):
        def observe(self, plan, seconds):
            observed.append(seconds)

    time_is, observed = SimpleNamespace(now_s=0.0), []
    scheduler = make(Timed(random.Random(0)), clock=lambda: time_is.now_s)
    executor = FakeExecutor()
    for number in range(2):
        time_is.now_s += 100.0
        scheduler.add(request(number, range(6), max_tokens=10))
        while (plan := scheduler.schedule()) is not None:
            result = executor.submit(plan).result()
            time_is.now_s += 3.0
            scheduler.update(plan, result)
            time_is.now_s += 0.5
        observed.append(None)
    first, *others = observed[: observed.index(None)]
    assert first == 3.0
    assert others
    assert set(others) == {3.5}
    assert observed[observed.index(None) + 1] == 3.0


class Counted(Drafter):
    """Guesses the same tokens always, and notes what became of them."""

    def __init__(self, *token_ids):
        self._draft = Draft(token_ids=token_ids)
        self.verified_counts, self.forced_counts, self.drawn = [], [], []

    def start(self, slot, token_ids, namespace=None, *, tenant="", draw=GREEDY_DRAW): ...

    def extend(self, slot, token_ids): ...

    def finish(self, slot): ...

    def propose(self, slot, max_tokens):
        return self._draft

    def verified(self, slot, draft, accepted):
        self.verified_counts.append((len(draft.token_ids), len(accepted)))

    def forced(self, slot, num_tokens):
        self.forced_counts.append(num_tokens)

    def see_drawn(self, slot, draft, drawn):
        self.drawn += drawn


@pytest.mark.parametrize(
    ("num_valid", "forced", "expected", "seen"),
    [(0, (), (3, 0), [9, -1, -1, -1]), (2, (), (3, 2), [1, 2, 9, -1]), (3, (7, 8), 2, [])],
    ids=["all cut", "one cut", "forced"],
)
def test_drafts_that_a_grammar_cuts_were_wrong_and_forced_tokens_are_none_of_them(
    num_valid, forced, expected, seen
):
    constraint = SimpleNamespace(
        advance=lambda _: None,
        forced=lambda most: forced[:most],
        valid=lambda tokens, _: range(min(num_valid, len(tokens))),
    )
    constraints = SimpleNamespace(prepare=lambda _: lambda: constraint)
    drafter = Counted(1, 2, 3)
    speculation = Speculation(drafter=drafter, max_tokens=4, constraints=constraints)
    params = {"structured_outputs": {"regex": "a"}}
    sequence = Sequence(
        request=request(0, range(6), **params),
        sample_index=0,
        token_ids=list(range(6)),
        kv=KVCacheManager(PrefixCache([1], [None], 4), max_length=4).new_sequence(
            None, max_length=64
        ),
        max_length=64,
        lane=(0, ""),
        grammar=lambda: constraint,
    )
    sequence.slot = 0
    speculation.start(sequence)
    drafts = speculation.propose(sequence, 4, []).token_ids
    assert drafts == (forced or (1, 2, 3)[:num_valid])
    segment = Segment(
        slot=0, start=5, stop=6 + len(drafts), token_ids=(5, *drafts), num_drafts=len(drafts)
    )
    tokens = (*drafts, 9)
    outcome = SegmentResult(token_ids=tokens, accepted=tuple(range(len(drafts))), drawn=tokens)
    speculation.verified(sequence, segment, outcome, tokens)
    assert drafter.drawn == seen
    assert drafter.verified_counts + drafter.forced_counts == [expected]
