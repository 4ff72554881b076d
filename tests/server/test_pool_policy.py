"""Which model stays: against Belady's choice, which knows the future."""

import heapq
import itertools
import random
from bisect import bisect

import pytest

from ridgeline.core.durations import parse_seconds
from ridgeline.server.pool.policy import RequestRate, SwitchPolicy, Tenancy

NUM_MODELS, ROOM = 8, 3
LOAD_S, RUN_S, MAX_WAIT_S = 5.0, 2.0, 75.0


def zipf_trace(num_requests, per_second, exponent, seed):
    """``(arrival, model)`` of each request."""
    random_ = random.Random(seed)
    weights = list(itertools.accumulate(1 / (i + 1) ** exponent for i in range(NUM_MODELS)))
    arrival_s, found = 0.0, []
    for _ in range(num_requests):
        arrival_s += random_.expovariate(per_second)
        found.append((arrival_s, bisect(weights, random_.random() * weights[-1])))
    return found


def belady_loads(models):
    """Loads, in order of arrival, if what is asked for last makes room (Belady 1966)."""
    following, seen = [0] * len(models), {}
    for place in reversed(range(len(models))):
        following[place] = seen.get(models[place], len(models))
        seen[models[place]] = place
    cache, loads = {}, 0
    for place, model in enumerate(models):
        if model not in cache:
            loads += 1
            if len(cache) == ROOM:
                del cache[max(cache, key=cache.get)]
        cache[model] = following[place]
    return loads


def replay(trace):
    """Loads, and the wait of each request, with one load at a time on a virtual clock."""
    models = [
        Tenancy(name=str(i), num_bytes=1, load_s=LOAD_S, rate=RequestRate(began_s=0.0))
        for i in range(NUM_MODELS)
    ]
    policy = SwitchPolicy(ROOM, max_wait_s=MAX_WAIT_S)
    order = itertools.count()
    events = [(arrival_s, next(order), "arrival", models[i]) for arrival_s, i in trace]
    loads, waits, loading, ticks = 0, [], None, False

    def push(at_s, kind, model):
        heapq.heappush(events, (at_s, next(order), kind, model))

    while events:
        now, _, kind, model = heapq.heappop(events)
        if kind == "arrival":
            model.rate.count(now)
            model.waiting[object()] = now
        elif kind == "end":
            model.running -= 1
        elif kind == "loaded":
            loading = None
        else:
            ticks = False
        if loading is None and (switch := policy.next_switch(models, now)) is not None:
            assert not any(each.running for each in switch.leave)
            for each in switch.leave:
                each.loaded_s = None
            loading, loads = switch.load, loads + 1
            loading.loaded_s = now
            assert policy.free_bytes(models) >= 0
            push(now + LOAD_S, "loaded", loading)
        for each in models:
            if each.loaded_s is not None and each is not loading and not each.is_leaving:
                for arrival_s in each.waiting.values():
                    waits.append(now - arrival_s)
                    each.running += 1
                    push(now + RUN_S, "end", each)
                each.waiting.clear()
        if not ticks and any(each.waiting for each in models):
            ticks = True
            push(now + 0.5, "tick", None)
    return loads, waits


@pytest.mark.parametrize(("per_second", "exponent"), [(0.5, 0.9), (0.5, 1.2), (2.0, 0.9)])
def test_a_zipf_trace_needs_about_as_many_loads_as_belady_does(per_second, exponent):
    trace = zipf_trace(1500, per_second, exponent, seed=1)
    loads, waits = replay(trace)
    assert len(waits) == len(trace)
    assert loads <= 1.1 * belady_loads([model for _, model in trace])
    assert max(waits) <= MAX_WAIT_S + NUM_MODELS * (LOAD_S + RUN_S)


def tenancy(name, *, requests=0, **fields):
    found = Tenancy(name=name, num_bytes=10, load_s=5, rate=RequestRate(began_s=0.0), **fields)
    for second in range(requests):
        found.rate.count(float(second))
    return found


def test_what_fits_is_loaded_at_once():
    wanted = tenancy("wanted", waiting={1: 100.0})
    switch = SwitchPolicy(20, max_wait_s=60).next_switch([tenancy("a", loaded_s=99.0), wanted], 100)
    assert (switch.load, switch.leave) == (wanted, ())


def test_the_cheapest_to_load_again_makes_room_and_a_running_one_never_does():
    models = [
        tenancy("busy", loaded_s=0.0, running=1),
        tenancy("popular", loaded_s=0.0, requests=9),
    ]
    models += [tenancy("rare", loaded_s=0.0, requests=1), tenancy("new", waiting={1: 100.0})]
    switch = SwitchPolicy(30, max_wait_s=60).next_switch(models, 100)
    assert [each.name for each in switch.leave] == ["rare"]


def test_a_model_in_use_gets_no_new_requests_once_another_was_waited_for_too_long():
    busy, late = tenancy("busy", loaded_s=0.0, running=1), tenancy("late", waiting={1: 100.0})
    policy = SwitchPolicy(10, max_wait_s=60)
    assert policy.next_switch([busy, late], 159) is None
    assert not busy.is_leaving
    assert policy.next_switch([busy, late], 160) is None
    assert busy.is_leaving
    busy.running = 0
    assert policy.next_switch([busy, late], 161).load is late


def test_one_request_does_not_drive_out_a_model_that_many_ask_for():
    popular = tenancy("popular", loaded_s=0.0, requests=100)  # one a second
    other = tenancy("other", waiting={1: 100.0})
    policy = SwitchPolicy(10, max_wait_s=60)
    assert policy.next_switch([popular, other], 101) is None
    other.waiting |= dict.fromkeys(range(2, 12), 100.0)
    assert policy.next_switch([popular, other], 101).load is other


def test_spans_of_time():
    assert [parse_seconds(text) for text in ("90", "10m", "1h30m", "250ms", "1.5s")] == [
        90, 600, 5400, 0.25, 1.5,
    ]  # fmt: skip
    assert parse_seconds("-1") == parse_seconds("-1s") == float("inf")
    for text in ("", "soon", "nan", "10m5"):
        with pytest.raises(ValueError, match=text[:4] or "float"):
            parse_seconds(text)
