"""Requests that wait for their grammars are counted, and given back."""

import threading
from types import SimpleNamespace

import pytest

from ridgeline import SamplingParams
from ridgeline.core.errors import OverloadedError
from ridgeline.core.request import Request
from ridgeline.engine.grammar_gate import GrammarGate


def request(number) -> Request:
    params = SamplingParams(structured_outputs={"regex": f"a{number}"})
    return Request(request_id=number, prompt_token_ids=(1,), params=params, seed=0)


def test_no_more_requests_wait_for_a_grammar_than_may():
    may_go = threading.Event()

    def prepare(wanted, tenant):
        may_go.wait(10)
        return wanted.source

    constraints = SimpleNamespace(prepare=prepare, is_prepared=lambda *_: False)
    gate = GrammarGate(constraints, max_held=3)
    try:
        assert all(gate.holds(request(number)) for number in range(3))
        with pytest.raises(OverloadedError) as info:
            gate.holds(request(3))
        assert info.value.retry_after_s > 0
        gate.abort(0)
        assert gate.holds(request(4))
        may_go.set()
        released = {}
        while len(released) < 3:
            released |= {each.request_id: grammar for each, grammar in gate.released()}
        assert released == {1: "a1", 2: "a2", 4: "a4"}
        assert len(gate) == 0
    finally:
        may_go.set()
        gate.close()
