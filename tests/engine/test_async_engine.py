"""`AsyncEngine` gives what `LLM` gives, in a thread and in a process of its own."""

import asyncio
import contextlib
import shutil
import threading

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    ContextLengthError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ridgeline.core.request import FinishReason, GenerateRequest
from ridgeline.engine import streams
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.stats import EngineStatus

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.2, seed=7, max_tokens=12, n=3)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = ["the cat", "a", "the mat sat on the cat on the mat"]


@pytest.fixture(scope="module", params=["thread", "process"])
def serve(request, model_folder):
    """Runs a coroutine function with an engine that all tests share, in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(main):
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(main, 60), loop).result()

    engine = AsyncEngine(settings(model_folder), in_process=request.param == "thread")
    run(engine.start())
    yield lambda main: run(main(engine))
    run(engine.shutdown())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def settings(model_folder):
    return EngineConfig(
        model=str(model_folder),
        executor="reference",
        dtype="float64",
        block_tokens=4,
        max_num_seqs=8,
    )


def wish(request_id, prompt="the cat", params=GREEDY, **fields):
    return GenerateRequest(request_id=request_id, prompt=prompt, params=params, **fields)


async def collect(engine, request):
    return [chunk async for chunk in engine.generate(request)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def text_of(chunks, index=0):
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def test_everything_that_a_server_needs(serve, llm):
    expected = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    (samples,) = llm.generate(PROMPTS[2], SAMPLED)
    vectors = llm.embed(PROMPTS)

    async def main(engine):
        assert engine.health().is_ready
        assert engine.spec == llm.spec
        assert engine.tokenizer.encode("the cat") == llm.tokenizer.encode("the cat")
        requests = [wish(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
        outputs = await asyncio.gather(*(collect(engine, each) for each in requests))
        for chunks, whole in zip(outputs, expected, strict=True):
            assert text_of(chunks) == whole.outputs[0].text
            tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
            assert tokens == whole.outputs[0].token_ids
            assert chunks[0].prompt.num_tokens == len(whole.prompt_token_ids)
            assert chunks[-1].timings.end_to_end_s > 0
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)

        chunks = await collect(engine, wish("n", PROMPTS[2], SAMPLED))
        for sample in samples.outputs:
            assert text_of(chunks, sample.index) == sample.text
        assert sum(chunk.timings is not None for chunk in chunks) == 1

        for prompt, vector in zip(PROMPTS, vectors, strict=True):
            embedding = await engine.embed(prompt, request_id="embed")
            assert np.allclose(embedding.vector, vector, atol=1e-6)
            assert np.isclose(np.linalg.norm(embedding.vector), 1)

        await until(lambda: engine.stats().generated_tokens >= 6 * 12)
        await until(lambda: engine.stats().num_running == 0)
        stats = engine.stats()
        assert stats.kv_usage == 0
        assert stats.steps[-1].step_id == stats.step_id
        assert stats.roofline.decode.tokens > 0

    serve(main)


def test_bad_requests_are_refused_at_once_and_harm_nobody(serve):
    async def main(engine):
        with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
            await collect(engine, wish("a", (5, 10**6)))
        with pytest.raises(InvalidRequestError, match="no adapter"):
            await collect(engine, wish("a", adapter="missing"))
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await collect(engine, wish("a", ()))
        running = engine.generate(wish("long", params=LONG))
        await anext(running)
        with pytest.raises(ContextLengthError, match="300 tokens and the context holds 256"):
            await collect(engine, wish("a", (5,) * 300))
        with pytest.raises(ContextLengthError, match="1000000 characters"):
            await collect(engine, wish("a", "a" * 1_000_000))
        with pytest.raises(InvalidRequestError, match="in progress"):
            await collect(engine, wish("long"))
        follower = await collect(engine, wish("follower"))
        assert follower[-1].finish_reason is FinishReason.LENGTH
        await running.aclose()

    serve(main)


def test_closing_cancelling_and_aborting_free_the_request(serve):
    async def main(engine):
        closed = engine.generate(wish("closed", params=LONG))
        await anext(closed)
        await closed.aclose()

        cancelled = asyncio.create_task(collect(engine, wish("cancelled", params=LONG)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled

        aborted = engine.generate(wish("aborted", params=LONG))
        await anext(aborted)
        await engine.abort("aborted")
        assert [chunk async for chunk in aborted][-1].finish_reason is FinishReason.ABORT
        await engine.abort("aborted")
        await engine.abort("never seen")

        assert engine.num_open_requests == 0
        await until(lambda: engine.stats().num_running == engine.stats().kv_usage == 0)

    serve(main)


def test_a_reader_who_does_not_read_gets_merged_chunks_and_holds_back_nobody(serve, llm):
    (whole,) = llm.generate("the cat", LONG)

    async def main(engine):
        slow = engine.generate(wish("slow", params=LONG))
        first = await anext(slow)
        for index in range(3):
            await collect(engine, wish(str(index)))
        await until(lambda: engine.stats().num_running == 0)
        chunks = [first] + [chunk async for chunk in slow]
        assert text_of(chunks) == whole.outputs[0].text
        assert len(chunks) < 20
        assert chunks[-1].timings is not None

    serve(main)


@pytest.mark.parametrize("in_process", [True, False])
def test_shutdown_lets_what_runs_end_and_refuses_the_rest(in_process, model_folder):
    async def main():
        engine = AsyncEngine(settings(model_folder), in_process=in_process)
        await engine.start()
        running = asyncio.create_task(collect(engine, wish("running", params=LONG)))
        await until(lambda: engine.num_open_requests == 1)
        stopping = asyncio.create_task(engine.shutdown(drain_s=30))
        await until(lambda: engine.health().status is EngineStatus.DRAINING)
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await collect(engine, wish("late"))
        assert (await running)[-1].finish_reason is FinishReason.LENGTH
        await stopping
        assert engine.health().status is EngineStatus.DEAD
        await engine.shutdown()

    asyncio.run(main())


def test_shutdown_aborts_what_does_not_end_in_time(model_folder):
    async def main():
        engine = AsyncEngine(settings(model_folder), in_process=True)
        await engine.start()
        running = asyncio.create_task(collect(engine, wish("running", params=LONG)))
        await until(lambda: engine.stats().num_running == 1)
        await engine.shutdown(drain_s=0)
        assert (await running)[-1].finish_reason is FinishReason.ABORT

    asyncio.run(main())


@pytest.mark.parametrize("in_process", [True, False])
def test_a_model_that_cannot_be_loaded_is_an_error_of_start(in_process, tmp_path):
    async def main():
        engine = AsyncEngine(EngineConfig(model=str(tmp_path / "none")), in_process=in_process)
        with pytest.raises(ModelNotFoundError):
            await engine.start()
        await engine.shutdown()

    asyncio.run(main())


def test_an_embedding_is_never_pooled_in_another_way_than_the_model_says(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    path = tmp_path / "model" / "1_Pooling" / "config.json"
    path.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}')
    with (
        LLM(str(tmp_path / "model")) as llm,
        pytest.raises(UnsupportedModelError, match="mean pooling of a decoder"),
    ):
        llm.embed("the cat")
    path.write_text('{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}')
    with LLM(str(tmp_path / "model")) as llm:
        assert llm.embed(["the cat", "a"]).shape == (2, llm.spec.hidden_size)


def test_log_probabilities_that_nobody_reads_end_the_request(serve, monkeypatch):
    monkeypatch.setattr(streams, "MAX_WAITING_LOGPROBS", 300)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, logprobs=5)

    async def main(engine):
        before = engine.stats().generated_tokens
        slow = engine.generate(wish("slow", params=params))
        await anext(slow)
        await until(lambda: engine.stats().generated_tokens >= before + 50)
        await until(lambda: engine.stats().num_running == 0)
        with pytest.raises(EngineError, match="too slow"):
            [chunk async for chunk in slow]
        assert (await collect(engine, wish("next")))[-1].finish_reason is FinishReason.LENGTH

    serve(main)


def test_weights_that_cannot_be_loaded_are_an_error_of_start_said_once(
    model_folder, tmp_path, caplog
):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)

    async def main():
        engine = AsyncEngine(EngineConfig(model=str(tmp_path)))
        with pytest.raises(Exception, match=r"model\.safetensors"):
            await engine.start()
        await engine.shutdown()

    asyncio.run(main())
    assert not caplog.records
