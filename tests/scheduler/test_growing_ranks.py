"""The lowest of ranks that grow, against a look at all of them."""

import random

from tests.scheduler.simulation import Simulation, make_request

from ridgeline.scheduler.growing_ranks import GrowingRanks
from ridgeline.scheduler.policies import FairShare, Priority
from ridgeline.scheduler.waiting_queue import WaitingQueue


def test_the_first_is_the_minimum_whatever_joins_leaves_and_grows():
    rng = random.Random(0)
    ranks: dict[str, float] = {}
    members: set[str] = set()
    lowest = GrowingRanks(lambda name: ranks[name], members)
    for _ in range(20_000):
        name = str(rng.randrange(300))
        match rng.randrange(4):
            case 0:
                ranks.setdefault(name, 0.0)
                members.add(name)
                lowest.add(name)
            case 1:
                members.discard(name)
                if rng.randrange(2):
                    ranks.pop(name, None)  # forgotten: it comes back with a lower rank
            case 2:
                ranks[name] = ranks.get(name, 0.0) + rng.randrange(100)
            case 3:
                first = lowest.first()
                assert (first is None) == (not members)
                if first is not None:
                    assert first in members
                    assert ranks[first] == min(ranks[each] for each in members)
        assert len(lowest._heap) <= 2 * 300 + 65


def test_the_head_of_a_queue_is_the_first_of_all_whoever_leaves():
    """Many leave from the middle, so that lanes are cleared of them."""
    rng = random.Random(0)
    scheduler = Simulation(scheduling_policy="priority").scheduler
    queue, waiting = WaitingQueue(Priority()), set()
    for number in range(600):
        more = {"priority": rng.randrange(3), "tenant": rng.choice("ab")}
        (sequence,) = scheduler.add(make_request(number, 0.0, **more))
        queue.push(sequence)
        waiting.add(sequence)
        while len(waiting) > 300 or (waiting and rng.random() < 0.3):
            gone = rng.choice(sorted(waiting, key=queue.full_rank)[-50:])
            queue.remove(gone)
            waiting.remove(gone)
        if number % 5 == 0:
            assert queue.head() is min(waiting, key=queue.full_rank, default=None)
            assert len(queue) == len(waiting) == sum(each in queue for each in waiting)
            num_entries = sum(map(len, queue._lanes.values()))
            assert num_entries <= 2 * len(waiting) + 64
    while waiting:
        queue.remove(head := min(waiting, key=queue.full_rank))
        waiting.remove(head)
    assert queue.head() is None and not queue


def test_those_that_left_do_not_pile_up():
    members: set[str] = set()
    lowest = GrowingRanks(float, members)
    for number in range(3000):
        members.add(str(number))
        lowest.add(str(number))
        members.discard(str(number))
    assert len(lowest._heap) < 100


def test_a_step_under_fair_share_does_not_look_at_all_tenants(monkeypatch):
    looks = []
    lane_rank = FairShare.lane_rank

    def counted(policy, lane):
        looks.append(lane)
        return lane_rank(policy, lane)

    monkeypatch.setattr(FairShare, "lane_rank", counted)
    scheduler = Simulation(scheduling_policy="fair", max_num_seqs=2).scheduler
    for number in range(500):
        scheduler.add(make_request(number, 0.0, tenant=f"tenant {number}"))
    looks.clear()
    scheduler.schedule()
    assert 0 < len(looks) < 100
