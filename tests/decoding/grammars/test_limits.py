"""Bombs are refused in time, or harmless; and the streams of others go on meanwhile."""

import asyncio
import os

import psutil
import pytest
from tests.decoding.grammars.bombs import cycle, every_bomb
from tests.decoding.grammars.conftest import allowed

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError, OverloadedError
from ridgeline.core.request import GenerateRequest
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars import checker as checker_module
from ridgeline.decoding.grammars import compiler as compiler_module
from ridgeline.decoding.grammars.checker import GrammarChecker
from ridgeline.engine.async_engine import AsyncEngine

BOMBS = list(every_bomb())


def cpu_seconds():
    """Processor time of this process and its children; the clock depends on what else runs."""
    children = psutil.Process().children(recursive=True)
    return sum(os.times()[:4]) + sum(sum(child.cpu_times()[:2]) for child in children)


@pytest.mark.slow
def test_every_bomb_is_refused_within_two_seconds_or_harmless(compiler, counted):
    refused = 0
    for bomb in BOMBS:
        started = cpu_seconds()
        try:
            one = compiler.prepare(StructuredOutputs.of(bomb))()
        except InvalidRequestError:
            refused += 1
        else:
            for _ in range(20):
                tokens = allowed(one.masks(())[0])
                if not tokens or one.is_complete:
                    break
                one.advance([tokens[len(tokens) // 2]])
                one.forced(16)
        assert cpu_seconds() - started < 2.0, str(bomb)[:80]
    assert refused > 20
    counted(len(BOMBS))


def test_a_bomb_that_runs_for_hours_is_stopped_and_the_next_grammar_compiles(compiler):
    patterns = [{"pattern": f"^.*{number}.*$"} for number in range(500)]
    bomb = StructuredOutputs.of({"json": {"type": "string", "allOf": patterns}})
    with pytest.raises(InvalidRequestError, match="too much time"):
        compiler.prepare(bomb)
    compiler.prepare(StructuredOutputs.of({"regex": "after[a-z]*"}))


def test_a_machine_without_time_for_a_grammar_is_busy_and_the_grammar_is_not_at_fault(monkeypatch):
    checker = GrammarChecker((), {})
    monkeypatch.setattr(checker_module, "WALL_SECONDS", 0.001)  # less than a process takes to start
    with pytest.raises(OverloadedError, match="busy"):
        checker.tried("start: /a/")
    monkeypatch.undo()
    assert checker.tried("start: /a/")[0] == ""
    checker.close()


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_others_stream_on(count, counted):
    """A stream and its neighbour's bombs: the stream's text is that without them."""

    async def complete(engine, number, **params):
        params = SamplingParams(temperature=0, ignore_eos=True, **params)
        request = GenerateRequest(request_id=str(number), prompt="def f(x):", params=params)
        return [chunk async for chunk in engine.generate(request)]

    async def bombard(engine):
        for number, bomb in enumerate([*BOMBS[-1:], *cycle(count)]):
            try:
                wanted = StructuredOutputs.of(bomb)
                await complete(engine, f"bomb {number}", max_tokens=2, structured_outputs=wanted)
            except InvalidRequestError:
                pass

    async def run():
        config = EngineConfig(max_num_seqs=4, max_model_len=512)
        async with AsyncEngine(config, in_process=True) as engine:
            alone = await complete(engine, "alone", max_tokens=100)
            attack = asyncio.create_task(bombard(engine))
            texts = []
            while not attack.done():
                chunks = await complete(engine, f"canary {len(texts)}", max_tokens=100)
                texts.append("".join(chunk.text for chunk in chunks))
            await attack
            return "".join(chunk.text for chunk in alone), texts

    expected, texts = asyncio.run(run())
    assert texts
    assert set(texts) == {expected}
    counted(count)


@pytest.mark.parametrize("in_process", [False, True], ids=["queued", "gated"])
def test_what_was_accepted_is_never_compiled_again(monkeypatch, in_process):
    """More grammars wait than are kept, and none could be compiled when its turn comes."""
    asked = []

    def once(checker, grammar):
        asked.append(grammar)
        return ("" if asked.count(grammar) == 1 else "it was compiled before"), 0

    async def complete(engine, number, params):
        request = GenerateRequest(request_id=str(number), prompt="x", params=params)
        return "".join([chunk.text async for chunk in engine.generate(request)])

    async def complete_all(wanted):
        config = EngineConfig(max_num_seqs=1, max_model_len=128)
        async with AsyncEngine(config, in_process=True) as engine:
            return await asyncio.gather(
                *(complete(engine, number, params) for number, params in enumerate(wanted))
            )

    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 1)
    monkeypatch.setattr(GrammarChecker, "tried", once)
    texts = [f"answer {number}" for number in range(6)]
    wanted = [SamplingParams(structured_outputs={"choice": [text]}) for text in texts]
    if in_process:
        assert asyncio.run(complete_all(wanted)) == texts
    else:
        with LLM(max_num_seqs=1, max_model_len=128) as llm:
            outputs = llm.generate(["x"] * len(wanted), wanted)
        assert [output.outputs[0].text for output in outputs] == texts
    assert len(asked) == len(texts)
