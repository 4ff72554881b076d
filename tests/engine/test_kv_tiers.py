"""KV that outlives its blocks, and its engine: outputs are as without, and only its own hit."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OutOfMemoryError,
    SettingsError,
)
from ridgeline.core.request import GenerateRequest
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.engine import Engine
from ridgeline.engine.messages import Stop
from ridgeline.engine.process_host import Patience
from ridgeline.engine.worker import Worker
from ridgeline.executors.cpu import executor as cpu_executor
from ridgeline.kernels.cpu import pool as cpu_pool
from ridgeline.kernels.cpu.library import LEVEL_VARIABLE, available_levels, chosen_level
from ridgeline.kvcache.tiers import DiskTier, transfer_thread, transfers
from ridgeline.weights.digest import content_digest

PROMPT = [(7 * i) % 290 for i in range(60)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=5)


def ask(folder, *, salt="", prompt=PROMPT, **settings):
    """Cached tokens and output of a new engine."""
    settings = {"dtype": "float64", "block_tokens": 4, "max_num_seqs": 4} | settings
    with LLM(str(folder), **settings) as llm:
        (result,) = llm.generate([prompt], PARAMS, cache_salt=salt)
        return result.num_cached_tokens, result.outputs[0].token_ids


def test_hits_survive_a_restart_and_change_nothing(model_folder, tmp_path):
    plain = ask(model_folder)
    disk = {"kv_disk_tier_path": str(tmp_path), "kv_ram_tier_bytes": 2**20}
    assert ask(model_folder, **disk) == plain
    cached, output = ask(model_folder, **disk)
    assert cached == 56  # the prompt's full blocks but the last, whose end has to be computed
    assert output == plain[1]
    longer = [*PROMPT, *output[:2], 3]
    assert ask(model_folder, prompt=longer, **disk) == (60, ask(model_folder, prompt=longer)[1])


def change_one_weight(folder):
    """Another number in one tensor."""
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "norm" in name)
    weights[name] = weights[name].clone()
    weights[name].view(-1)[0] += 1e-3
    save_file(weights, folder / "changed.safetensors")
    (folder / "changed.safetensors").replace(folder / "model.safetensors")


def test_only_the_same_model_dtype_and_salt_hit(model_folder, tmp_path):
    disk = {"kv_disk_tier_path": str(tmp_path / "kv")}
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    change_one_weight(other)
    ask(model_folder, **disk)
    assert ask(other, **disk)[0] == 0
    assert ask(model_folder, dtype="float32", **disk)[0] == 0
    assert ask(model_folder, salt="tenant", **disk)[0] == 0
    assert ask(model_folder, block_tokens=8, **disk)[0] == 0
    assert ask(model_folder, **disk)[0] == 56


@pytest.fixture
def longrope_folder(model_folder, tmp_path):
    """A model whose long factors hold beyond 70 tokens."""
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    config = json.loads((other / "config.json").read_text())
    section = {"rope_type": "longrope", "original_max_position_embeddings": 70}
    section |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    (other / "config.json").write_text(json.dumps(config | {"rope_scaling": section}))
    return other


def test_contexts_share_unless_they_decide_about_longrope(model_folder, longrope_folder, tmp_path):
    for folder, hits in ((model_folder, [0, 56, 56]), (longrope_folder, [0, 56, 0])):
        disk = {"kv_disk_tier_path": str(tmp_path / f"kv-{hits[-1]}")}
        contexts = (69, 70, 71)
        assert [ask(folder, max_model_len=length, **disk)[0] for length in contexts] == hits


@pytest.fixture
def other_level(monkeypatch):
    """Lets what is opened after its call run on other kernels."""

    def choose():
        others = [level for level in available_levels() if level != chosen_level()]
        if not others:
            pytest.skip("This machine runs one level.")
        monkeypatch.setenv(LEVEL_VARIABLE, others[-1])
        monkeypatch.setattr(cpu_pool, "_shared", {})

    return choose


def test_only_the_same_formats_and_kernels_hit(model_folder, tmp_path, monkeypatch, other_level):
    common = {"kv_disk_tier_path": str(tmp_path), "executor": "cpu", "dtype": "float32"}
    common["block_tokens"] = 16
    assert [ask(model_folder, **common)[0] for _ in range(2)] == [0, 48]
    int8 = common | {"quantization": "int8"}
    assert [ask(model_folder, **int8)[0] for _ in range(2)] == [0, 48]
    assert ask(model_folder, **common)[0] == 48
    with monkeypatch.context() as patch:
        patch.setattr(cpu_executor, "PACKING_VERSION", -1)
        assert ask(model_folder, **common)[0] == 0
    other_level()
    assert ask(model_folder, **common)[0] == 0


def test_swapped_in_sequences_go_on_as_if_nothing_had_happened(model_folder):
    prompts = [[(n * i) % 290 for i in range(1, 41)] for n in (3, 5, 7, 11)]
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=1)
    settings = {"dtype": "float64", "block_tokens": 4, "max_model_len": 96, "max_num_seqs": 4}
    with LLM(str(model_folder), **settings) as llm:
        plain = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        num_bytes = llm.config.kv_cache_bytes // llm.config.num_blocks[0]
    settings |= {"kv_cache_memory_bytes": 30 * num_bytes, "kv_ram_tier_bytes": 2**24}
    with LLM(str(model_folder), **settings) as llm:
        swapped = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0
    assert swapped == plain


def test_a_process_that_stops_has_time_to_write_what_was_begun():
    assert Patience().stop_s > transfers.FLUSH_S + 1.0


def test_tiers_without_a_prefix_cache_are_refused(model_folder):
    with pytest.raises(SettingsError, match="enable_prefix_caching"):
        LLM(str(model_folder), kv_ram_tier_bytes=100, enable_prefix_caching=False)


def test_the_digest_is_of_the_content_and_is_remembered(tmp_path):
    folder, memory = tmp_path / "model", tmp_path / "known.json"
    folder.mkdir()
    save_file({"a": torch.zeros(10)}, folder / "model.safetensors")
    first = content_digest([folder], memory=memory)
    assert content_digest([folder], memory=memory) == first == content_digest([folder])
    memory.write_text("damaged")
    assert content_digest([folder], memory=memory) == first
    save_file({"a": torch.ones(10)}, folder / "model.safetensors")
    assert content_digest([folder], memory=memory) != first


def pin_many(llm):
    for n in range(30):
        llm.pin_prefix([(n * i + n) % 290 for i in range(90)])


def test_pins_and_miss_reports_through_llm(model_folder):
    settings = {"dtype": "float64", "block_tokens": 4, "max_model_len": 128, "max_num_seqs": 3}
    with LLM(str(model_folder), **settings) as llm:
        number = llm.pin_prefix(PROMPT)
        for n in range(30):  # enough to evict all that is not pinned
            llm.generate([[(n * i + n) % 290 for i in range(90)]], SamplingParams(max_tokens=1))
        report = llm.explain_miss([*PROMPT[:50], 299, *PROMPT[51:]])
        assert (report.num_cached, report.num_matching) == (48, 50)
        assert (report.token_id, report.cached_token_id) == (299, PROMPT[50])
        (result,) = llm.generate([PROMPT], SamplingParams(max_tokens=1))
        assert result.num_cached_tokens == 56
        llm.unpin_prefix(number)
        with pytest.raises(OutOfMemoryError, match="pinned prefixes would take"):
            pin_many(llm)
        assert llm.generate([PROMPT * 2], SamplingParams(max_tokens=1))[0].finished
        llm._loop.check_integrity()
    with (
        LLM(str(model_folder), enable_prefix_caching=False) as llm,
        pytest.raises(InvalidRequestError, match="no prefix cache"),
    ):
        llm.pin_prefix(PROMPT)


async def ask_as(engine, tenant):
    request = GenerateRequest(
        request_id=tenant, prompt=tuple(PROMPT), params=PARAMS, tenant=tenant, cache_salt=tenant
    )
    chunks = [chunk async for chunk in engine.generate(request)]
    return next(c.prompt.num_cached_tokens for c in chunks if c.prompt is not None)


def test_a_tenants_kv_is_deleted_through_the_async_engine(model_folder, tmp_path):
    config = EngineConfig(model=str(model_folder), block_tokens=16, kv_disk_tier_path=str(tmp_path))

    async def main():
        async with AsyncEngine(config, in_process=True) as engine:
            found = [await ask_as(engine, tenant) for tenant in "abab"]
            await engine.delete_tenant("a")
            return [*found, await ask_as(engine, "a"), await ask_as(engine, "b")]

    assert asyncio.run(main()) == [0, 0, 48, 48, 0, 48]


def test_a_deletion_is_remembered_until_the_files_are_gone(model_folder, tmp_path, monkeypatch):
    config = EngineConfig(model=str(model_folder), block_tokens=16, kv_disk_tier_path=str(tmp_path))
    may_delete, delete = threading.Event(), DiskTier.delete_tenant

    def slowly(tier, tenant):
        assert may_delete.wait(10)
        return delete(tier, tenant)

    monkeypatch.setattr(DiskTier, "delete_tenant", slowly)

    async def main():
        async with AsyncEngine(config, in_process=True) as engine:
            await ask_as(engine, "a")
            await engine.delete_tenant("a")
            await ask_as(engine, "b")
            assert engine._deletions == {"a"}
            may_delete.set()
            while engine._deletions:
                await asyncio.sleep(0.01)
            while len(list(tmp_path.rglob("*.kv"))) < 4:  # of tenant b
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_deletion_is_not_lost_while_the_engine_starts_again(model_folder, tmp_path):
    config = EngineConfig(model=str(model_folder), block_tokens=16, kv_disk_tier_path=str(tmp_path))

    async def main():
        async with AsyncEngine(config) as engine:
            for tenant in "ab":
                await ask_as(engine, tenant)
            while len(list(tmp_path.rglob("*.kv"))) < 2 * 4:
                await asyncio.sleep(0.01)
            os.kill(engine.worker_pid, signal.SIGKILL)
            await engine.delete_tenant("a")  # to a process that is dead, which nobody knows yet
            while engine.health().is_ready:
                await asyncio.sleep(0.01)
            while not engine.health().is_ready:
                await asyncio.sleep(0.01)
            return [await ask_as(engine, "a"), await ask_as(engine, "b")]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [0, 48]


def test_a_process_that_starts_again_with_other_weights_finds_no_kv(model_folder, tmp_path):
    folder, kv = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(model_folder, folder)
    config = EngineConfig(model=str(folder), block_tokens=16, kv_disk_tier_path=str(kv))

    async def main():
        async with AsyncEngine(config) as engine:
            for tenant in "ab":
                await ask_as(engine, tenant)
            while len(list(kv.rglob("*.kv"))) < 2 * 4:
                await asyncio.sleep(0.01)
            change_one_weight(folder)
            os.kill(engine.worker_pid, signal.SIGKILL)
            retried = None
            while retried is None:  # refused once it is known that the process is dead
                with contextlib.suppress(EngineUnavailableError):
                    retried = await ask_as(engine, "a")
                await asyncio.sleep(0.01)
            return [retried, await ask_as(engine, "b"), await ask_as(engine, "b")]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [0, 0, 48]


def test_a_process_that_starts_again_keeps_the_factors_of_longrope(longrope_folder, tmp_path):
    """Though memory left less than the original length of the context that was not set."""
    config = EngineConfig(
        model=str(longrope_folder),
        dtype="float32",
        block_tokens=16,
        max_num_seqs=2,
        kv_cache_memory_bytes=5 * 16 * (3 * 2 * 3 * 8 * 4) - 1,  # layers, K and V, heads
        kv_disk_tier_path=str(tmp_path / "kv"),
    )

    async def main():
        async with AsyncEngine(config) as engine:
            before = engine.config
            assert 60 < before.max_model_len < 70
            await ask_as(engine, "a")
            while len(list((tmp_path / "kv").rglob("*.kv"))) < 3:
                await asyncio.sleep(0.01)
            os.kill(engine.worker_pid, signal.SIGKILL)
            while engine.health().is_ready:
                await asyncio.sleep(0.01)
            while not engine.health().is_ready:
                await asyncio.sleep(0.01)
            assert engine.config == before
            return await ask_as(engine, "a")

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 48


def test_kv_expires_in_the_pool_and_in_the_tiers_of_an_idle_engine(
    model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(transfer_thread, "_EXPIRE_EVERY_S", 0.01)
    disk = {"kv_disk_tier_path": str(tmp_path), "kv_ram_tier_bytes": 2**20}
    engine = Engine(EngineConfig(model=str(model_folder), block_tokens=4, kv_ttl_s=0.5, **disk))
    engine.loop.add(engine.requests.build(PROMPT, PARAMS))
    while engine.loop.has_work:
        engine.loop.step()
    (pool,), tiers = engine.scheduler.prefix_cache.pools, engine.scheduler.transfers._tiers
    assert pool.num_cached
    deadline_s = time.monotonic() + 20

    def receive(*, wait_s):
        time.sleep(0.01)
        is_empty = not (pool.num_cached or any(tier.usage().num_entries for tier in tiers))
        saved = engine.scheduler.num_tier_blocks[0]
        return [Stop()] if (saved and is_empty) or time.monotonic() > deadline_s else []

    assert Worker(engine, receive=receive, send=lambda _: None).run() is None
    assert time.monotonic() < deadline_s
    assert engine.scheduler.num_tier_blocks[0] > 0
    assert not list(tmp_path.rglob("*.kv"))
