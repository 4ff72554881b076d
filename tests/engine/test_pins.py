"""Pinned prefixes through the `AsyncEngine`: kept whole or not at all, and named once."""

import asyncio
import os
import signal

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError, OverloadedError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.kvcache import KVCacheManager

PROMPT = tuple((7 * i) % 290 for i in range(60))


def pinned_after(model_folder, monkeypatch, *, evictions):
    """Pin a prefix that is evicted so often between its computation and the pin."""
    pin = KVCacheManager.pin
    left = [evictions]

    def pin_late(pins, *arguments):
        if left[0]:
            left[0] -= 1
            for pool in pins._cache.pools:
                pool.release(pool.allocate(pool.num_free))
        return pin(pins, *arguments)

    monkeypatch.setattr(KVCacheManager, "pin", pin_late)

    async def main():
        config = EngineConfig(model=str(model_folder), block_tokens=16)
        async with AsyncEngine(config, in_process=True) as engine:
            return await engine.pin_prefix(PROMPT, request_id="a")

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_prefix_that_was_evicted_meanwhile_is_computed_again(model_folder, monkeypatch):
    assert pinned_after(model_folder, monkeypatch, evictions=2).num_tokens == 48


def test_a_prefix_that_cannot_be_kept_is_no_success(model_folder, monkeypatch):
    with pytest.raises(OverloadedError, match="evicted before"):
        pinned_after(model_folder, monkeypatch, evictions=3)


def test_who_unpins_after_a_restart_releases_no_other_pin(model_folder):
    async def main():
        async with AsyncEngine(EngineConfig(model=str(model_folder), block_tokens=16)) as engine:
            lost = await engine.pin_prefix(PROMPT, request_id="a")
            os.kill(engine.worker_pid, signal.SIGKILL)
            while engine.health().is_ready:
                await asyncio.sleep(0.01)
            while not engine.health().is_ready:
                await asyncio.sleep(0.01)
            kept = await engine.pin_prefix(PROMPT[1:], request_id="b")
            with pytest.raises(InvalidRequestError, match="is pinned"):
                engine.unpin_prefix(lost.number)
            assert engine.pinned_prefixes == (kept,)
            engine.unpin_prefix(kept.number)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_leaves_just_as_the_pin_is_made_holds_nothing(model_folder):
    async def main():
        config = EngineConfig(model=str(model_folder), block_tokens=16)
        async with AsyncEngine(config, in_process=True) as engine:
            pinning = asyncio.create_task(engine.pin_prefix(PROMPT, request_id="a"))
            answer, sent = engine._answer, []
            send = engine._host.send

            def answer_and_leave(number, found):
                answer(number, found)
                pinning.cancel()

            engine._answer = answer_and_leave
            engine._host.send = lambda message: (sent.append(message), send(message))
            with pytest.raises(asyncio.CancelledError):
                await pinning
            assert engine.pinned_prefixes == ()
            assert [type(each).__name__ for each in sent] == ["Add", "Pin", "Unpin"]

    asyncio.run(asyncio.wait_for(main(), 60))
