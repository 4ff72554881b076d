"""More requests than may wait: the rest is refused at once, with the seconds to stay away."""

import asyncio
from dataclasses import replace

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineUnavailableError, OverloadedError
from ridgeline.core.request import GenerateRequest
from ridgeline.engine.async_engine import AsyncEngine

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def test_llm_refuses_and_goes_on(model_folder):
    with LLM(str(model_folder), max_num_seqs=1, max_num_waiting=2) as llm:
        streams = [llm.stream([1, 2, n], LONG) for n in range(2)]
        with pytest.raises(OverloadedError) as refused:
            llm.stream([1, 2, 3], LONG)
        assert refused.value.retry_after_s >= 1.0
        assert [len(list(stream)) > 0 for stream in streams] == [True, True]
        assert len(llm.generate([[1, 2, 3]], LONG)[0].outputs[0].token_ids) == 60


def test_what_is_refused_in_part_leaves_nothing_in_the_queue(model_folder):
    with LLM(str(model_folder), max_num_waiting=4) as llm:
        prompts = [[1, 2, n] for n in range(5)]
        for refused in (llm.embed, llm.generate):
            with pytest.raises(OverloadedError):
                refused(prompts)
        assert len(llm.embed(prompts[:4])) == 4
        assert len(llm.generate(prompts[:4], LONG)) == 4


@pytest.mark.parametrize("in_process", [True, False], ids=["thread", "process"])
def test_the_error_crosses_to_the_caller_of_an_async_engine(model_folder, in_process):
    async def ask(engine, number):
        request = GenerateRequest(request_id=str(number), prompt=(1, 2, number), params=LONG)
        try:
            chunks = [chunk async for chunk in engine.generate(request)]
        except OverloadedError as error:
            return error.retry_after_s
        return sum(len(chunk.token_ids) for chunk in chunks)

    async def main():
        config = EngineConfig(model=str(model_folder), max_num_seqs=1, max_num_waiting=2)
        engine = AsyncEngine(config, in_process=in_process)
        await engine.start()
        try:
            return await asyncio.gather(*(ask(engine, number) for number in range(12)))
        finally:
            await engine.shutdown(drain_s=1.0)

    outcomes = asyncio.run(main())
    refused = [outcome for outcome in outcomes if outcome != 60]
    assert 0 < len(refused) < 12
    assert all(isinstance(seconds, float) and seconds >= 1.0 for seconds in refused)


@pytest.mark.parametrize("in_process", [True, False], ids=["thread", "process"])
def test_an_embedding_without_a_vector_is_an_error_and_the_engine_goes_on(model_folder, in_process):
    """Shed by a more urgent request, aborted by name, and aborted by the end of the engine."""
    config = EngineConfig(
        model=str(model_folder),
        max_num_seqs=1,
        max_num_waiting=1,
        scheduling_policy="priority",
        decode_replay_s=0,  # so that what runs still runs when the others come
    )

    def ask(engine, name, priority):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        return engine.generate(
            GenerateRequest(request_id=name, prompt=(1, 2), params=params, priority=priority)
        )

    def embed(engine, priority):
        embedding = engine.embed((1, 2), request_id="embedding", priority=priority)
        return asyncio.create_task(embedding)

    async def main():
        engine = AsyncEngine(config, in_process=in_process)
        await engine.start()
        running = ask(engine, "running", 0)
        await anext(running)
        shed = embed(engine, 5)
        await asyncio.sleep(0)
        urgent = [chunk async for chunk in ask(engine, "urgent", 1)]
        with pytest.raises(OverloadedError, match="more urgent") as refused:
            await shed
        assert refused.value.retry_after_s >= 1.0
        assert sum(len(chunk.token_ids) for chunk in urgent) == 200
        await running.aclose()
        assert engine.health().is_ready
        assert engine.stats().num_restarts == 0

        for end in (lambda: engine.abort("embedding"), engine.shutdown):
            embedding = embed(engine, 0)
            await asyncio.sleep(0)
            await end()
            with pytest.raises(EngineUnavailableError, match="aborted"):
                await embedding

    asyncio.run(main())


def test_llm_says_that_an_embedding_was_shed(model_folder):
    settings = {"max_num_seqs": 1, "max_num_waiting": 1, "scheduling_policy": "priority"}
    with LLM(str(model_folder), **settings) as llm:
        loop = llm._loop
        add = loop.add

        def add_urgent_after(request, prompt):
            state = add(replace(request, priority=5), prompt)
            add(replace(request, request_id=request.request_id + 1, priority=1))
            return state

        loop.add = add_urgent_after
        with pytest.raises(OverloadedError, match="more urgent"):
            llm.embed("the cat")
