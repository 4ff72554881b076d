"""What each policy chooses, what breakers and budgets allow, what a view of prefixes knows."""

from ridgeline.fleet.breaker import CircuitBreaker, RetryBudget
from ridgeline.fleet.policies import (
    POLICIES,
    ByPredictedSeconds,
    EngineChoice,
    EngineLoad,
    LoadColumns,
    Wanted,
    placement_seconds,
)
from ridgeline.fleet.prefixes import BLOCK_BYTES, PrefixView, prefix_blocks
from ridgeline.scheduler.prediction import LinearPredictor

LINEAR = LinearPredictor(pass_s=0.01, token_s=1e-4)
WANTED = Wanted(prompt_tokens=1000, output_tokens=100, session=b"user")


def engine(name, *, cached=0, linear=LINEAR, **load):
    load = EngineLoad(linear=linear, pass_s=linear.pass_s, max_seqs=8, **load)
    return EngineChoice(name=name, load=load, cached_tokens=cached)


def first(policy, *engines, wanted=WANTED):
    return POLICIES[policy]().ranked(wanted, engines)[0].name


def test_a_placement_costs_its_own_seconds_and_those_of_others():
    engines = [
        engine("alone"),
        engine("shared", num_running=4, context_tokens=4000),
        engine("queued", num_pending=2, pending_tokens=3000),
        engine("full", num_running=8, context_tokens=8000),
    ]
    seconds = placement_seconds(WANTED, LoadColumns.of_choices(engines))
    assert seconds.added_s[0] == 0
    assert abs(seconds.ttft_s[0] - (1000 * 1e-4 + 0.01)) < 1e-12
    assert abs(seconds.added_s[1] - (4 * 0.1 + 4 * 1e-4 * 50)) < 1e-12
    assert abs(seconds.ttft_s[2] - seconds.ttft_s[0] - 0.3) < 1e-12
    assert seconds.ttft_s[3] > seconds.ttft_s[1] + 100 * 0.01 / 8


def test_by_seconds_a_cached_prefix_is_worth_its_seconds_and_no_more():
    free = engine("free")
    assert first("least-seconds", free, engine("holder", cached=900, num_running=1)) == "holder"
    crowded = engine("holder", cached=900, num_pending=4, pending_tokens=4000)
    assert first("least-seconds", free, crowded) == "free"
    slow = LinearPredictor(pass_s=0.1, token_s=1e-3)
    assert (
        first("least-seconds", engine("slow", linear=slow), engine("fast", num_running=2)) == "fast"
    )
    equal = [engine(name) for name in "abcdef"]
    names, columns = [each.name for each in equal], LoadColumns.of_choices(equal)
    for session in range(20):
        wanted = Wanted(prompt_tokens=9, output_tokens=9, session=b"%d" % session)
        best = names[ByPredictedSeconds().cheapest(wanted, columns, names)]
        assert best == first("least-seconds", *equal, wanted=wanted)


def test_the_others():
    busy, idle = engine("a", num_running=3, cached=800), engine("b")
    assert first("least-loaded", busy, idle) == "b"
    assert first("prefix", busy, idle) == "a"
    assert first("prefix", engine("a", num_running=9, cached=800), idle) == "b"
    assert first("prefix", engine("a", num_running=3, cached=400), idle) == "b"
    engines = [engine(name) for name in "abcd"]
    sessions = [Wanted(prompt_tokens=1, output_tokens=1, session=b"%d" % i) for i in range(64)]
    chosen = [first("session", *engines, wanted=each) for each in sessions]
    assert set(chosen) == set("abcd")
    without_a = [first("session", *engines[1:], wanted=each) for each in sessions]
    assert all(old in (new, "a") for old, new in zip(chosen, without_a, strict=True))
    turns = POLICIES["round-robin"]()
    assert [turns.ranked(WANTED, engines)[0].name for _ in range(5)] == list("abcda")


def test_a_breaker_opens_probes_tries_one_and_closes():
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(2):
        breaker.fail()
    breaker.succeed()
    for _ in range(3):
        assert breaker.allows
        breaker.fail()
    assert (breaker.state, breaker.allows, breaker.wants_probe) == ("open", False, False)
    now[0] = 0.5
    assert breaker.wants_probe
    breaker.fail()  # the probe
    now[0] = 1.4
    assert not breaker.wants_probe
    now[0] = 1.5
    breaker.probed()
    assert (breaker.state, breaker.allows) == ("half-open", True)
    breaker.begin()
    assert not breaker.allows
    breaker.succeed()
    assert (breaker.state, breaker.allows) == ("closed", True)


def test_retries_are_a_tenth():
    budget = RetryBudget()
    assert sum(budget.take() for _ in range(50)) == 10
    for _ in range(100):
        budget.request()
    assert 9 <= sum(budget.take() for _ in range(50)) <= 10


def test_a_view_knows_the_last_prompts_as_far_as_there_is_room():
    prompt = bytes(range(256)) * 8
    blocks = prefix_blocks(prompt, b"key")
    assert len(blocks) == 8
    assert blocks[:4] == prefix_blocks(prompt[: 4 * BLOCK_BYTES + 9], b"key")
    assert not set(blocks) & set(prefix_blocks(prompt, b"other"))
    view = PrefixView()
    view.renew("first", 512)
    view.add(blocks)
    assert view.cached_tokens(blocks) == 512
    assert view.cached_tokens(prefix_blocks(prompt[:600] + bytes(900), b"key")) == 128
    view.add(prefix_blocks(bytes(1024), b""))
    assert view.cached_tokens(blocks) == 256  # its end was given up
    view.renew("second", 512)
    assert view.cached_tokens(blocks) == 0
