"""What pairs of engines cost, when roles save seconds, and what a router makes of both."""

import json
from math import inf

import numpy as np
import pytest
from msgspec.structs import replace
from tests.fleet.test_policies import LINEAR, engine

from ridgeline.core.errors import SettingsError
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.handing_over import HandingOver
from ridgeline.fleet.pairs import pair_seconds, transfer_seconds
from ridgeline.fleet.policies import (
    POLICIES,
    ByPredictedSeconds,
    LoadColumns,
    Wanted,
    placement_seconds,
)
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.roles import FleetLoad, Roles, felt_seconds
from ridgeline.fleet.upstream import UpstreamPool
from ridgeline.server.schemas.operations import EngineState

LONG = Wanted(prompt_tokens=4000, output_tokens=100)
LOAD = FleetLoad(
    rate_rps=10.0, prompt_s=0.23, transfer_s=0.05, output_tokens=200, tokens=3100, pass_s=0.01,
    part_s=8e-5, max_seqs=128, kv_tokens=300_000,
)  # fmt: skip


def columns(*engines):
    return LoadColumns.of_choices(engines)


def transfers(seconds, count=2):
    return transfer_seconds(1000, [1.0] * count, np.full((count, count), 1000 / seconds), 0.0)


def test_one_engine_for_all_costs_what_its_placement_does_and_its_own_output():
    engines = columns(engine("a", num_running=3, context_tokens=3000), engine("b"))
    pairs, placed = (
        pair_seconds(LONG, engines, np.zeros(2), transfers(0.1)),
        placement_seconds(LONG, engines),
    )
    part_s, steps = 1e-4, LONG.output_tokens
    output_s = steps * (LINEAR.pass_s + np.array([4, 1]) * part_s)
    both = pairs.prefill_s + np.diagonal(pairs.decode_s)
    assert both == pytest.approx(placed.weighted_s + output_s / 10)
    assert pairs.best() == (1, 1)


def test_a_prompt_leaves_those_who_decode_alone_as_far_as_the_wire_is_fast_enough():
    idle = engine("p", num_running=0)
    crowd = engine("d", num_running=1, context_tokens=1000)
    shares = np.array([0.8, 0.0])
    fast, slow = (
        pair_seconds(LONG, columns(idle, crowd), shares, transfers(s)) for s in (0.01, 90)
    )
    assert fast.best() == (0, 1)
    assert fast.best_after(0) == 1
    assert slow.best() in ((0, 0), (1, 1))
    assert slow.best_after(0) == 0
    assert slow.of_two().best() == (0, 1)


def test_what_cannot_be_read_is_infinitely_far():
    rates = [[0, 4e3, 0], [1e3, 0, 1e3], [1e3, 0, 0]]
    seconds = transfer_seconds(1000, [2.0, 0.0, 1.0], rates, 0.1)
    assert seconds.tolist() == [[0.0, 0.6, inf], [inf, 0.0, inf], [1.1, inf, 0.0]]
    alone = engine("a"), engine("b"), engine("c")
    pairs = pair_seconds(LONG, columns(*alone), np.zeros(3), seconds).of_two()
    assert pairs.decode_s[1].argmin() == 1  # nobody reads of it


def test_roles_pay_where_prompts_are_long_and_engines_enough():
    def felt(num_prefill, **changes):
        values = {name: getattr(LOAD, name) for name in LOAD.__dataclass_fields__} | changes
        return felt_seconds(FleetLoad(**values), 4, num_prefill)

    assert felt(3) < 0.9 * felt(0)
    assert felt(1) == inf  # it cannot compute all prompts
    assert felt(3, transfer_s=10.0) > felt(0, transfer_s=10.0)
    assert felt(3, prompt_s=0.01) > 0.95 * felt(0, prompt_s=0.01)
    assert felt(3, kv_tokens=50_000) == inf


def noted(roles, *, until_s, rate_rps=10, prompt_s=0.23, transfer_s=0.05):
    for number in range(int(until_s * rate_rps)):
        roles.note(number / rate_rps, LONG, prompt_s=prompt_s, transfer_s=transfer_s)


def test_roles_come_with_the_load_and_go_with_it():
    names = list("abcd")
    engines = columns(*(engine(name, num_running=n) for n, name in enumerate(names)))
    engines.max_seqs[:] = 128
    roles = Roles()
    roles.note(0.0, LONG, prompt_s=0.23, transfer_s=0.05)
    assert roles.shares(0.1, names, engines) is None  # too early to say
    roles = Roles()
    noted(roles, until_s=20)
    for _ in range(20):
        roles.note_output(200)
    shares = roles.shares(20.0, names, engines)
    assert roles.prefilling == {"a", "b", "c"}  # where the fewest decode
    assert shares is not None
    assert shares[0] == pytest.approx(10 * 0.23 / 3, rel=0.1)
    assert shares[3] == 0
    engines.num_running[:] = [9, 9, 9, 0]
    roles.shares(21.5, names, engines)
    assert roles.prefilling == {"a", "b", "c"}
    roles.note(90.0, LONG, prompt_s=0.01, transfer_s=0.05)
    assert roles.shares(90.0, names, engines) is None


def test_what_prompts_take_is_learned_of_those_that_nobody_joined():
    roles = Roles()
    for number in range(200):
        roles.note_seconds(0.1, 0.15 if number % 2 else 0.4)
    assert roles.scale == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize(
    "lacking", [{}, {"router_key_file": "key", "policy": "session"}], ids=["no key", "other policy"]
)
def test_disaggregation_that_cannot_be_is_refused(lacking):
    with pytest.raises(SettingsError, match="disaggregate has no effect without"):
        RouterConfig(engine=("http://a",), disaggregate="auto", **lacking)


def test_price_is_still_a_name_of_the_policy_by_seconds():
    config = RouterConfig(
        engine=("http://a",), policy="price", disaggregate="auto", router_key_file="key"
    )
    assert POLICIES[config.policy] is ByPredictedSeconds


def test_with_always_what_no_other_can_go_on_with_goes_where_it_costs_the_least():
    state = EngineState(
        ready=True, reason=None, is_open=False, epoch="", models=(), max_seqs=8, kv_tokens=9000,
        pass_s=0.01, token_s=1e-4, pair_s=0.0, kv_token_bytes=8.0,
    )  # fmt: skip
    engines = []
    for name, other in ("ab", "ba"):
        engines.append(RoutedEngine(name, UpstreamPool("http://a", connect_timeout_s=1.0), b"key"))
        engines[-1].state = replace(state, kv_name=name, kv_sources={other: 1e9})
    path, placed = "/v1/completions", HandingOver(always=True)
    body = {"prompt": "x" * 3600, "max_tokens": 60}

    def place(**fields):
        data = json.dumps(body | fields).encode()
        request = RoutedRequest(method="POST", path=path, target=b"", headers=[], body=data)
        return request, placed.place(request, engines, 0, 0.0)

    with engines[0].tracked(place(stream=True)[0]):
        sent = place()[1]
        assert (sent.engine.name, sent.hands_over) == ("b", False)
        sent = place(stream=True)[1]
        assert (sent.engine.name, sent.hands_over) == ("b", True)
