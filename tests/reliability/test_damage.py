"""Files that are damaged while they are in use: said, counted, and no wrong answer."""

import asyncio
import json
import os

import pytest
from tests.tiny import CONFIG

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError
from ridgeline.core.request import GenerateRequest
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.kernels.cpu.library import native_kernels_run

PROMPT = [(7 * i) % 290 for i in range(60)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=5)


def ask(folder, **tier):
    """Output, cached tokens, and what the disk tier counted as damaged."""
    settings = {"dtype": "float64", "block_tokens": 4, "max_num_seqs": 4} | tier
    with LLM(str(folder), **settings) as llm:
        (result,) = llm.generate([PROMPT], PARAMS)
        transfers = llm._engine.scheduler.transfers
        tiers = transfers._tiers if transfers else ()
        failures = sum(tier.usage().num_failures for tier in tiers)
        return result.outputs[0].token_ids, result.num_cached_tokens, failures


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # within K and V
    path.write_bytes(data)


def test_damaged_kv_is_read_noticed_counted_and_computed_again(model_folder, tmp_path):
    """Every file is damaged: what is read first fails, and nothing of it is used."""
    plain = ask(model_folder)
    tier = {"kv_disk_tier_path": str(tmp_path)}
    assert ask(model_folder, **tier) == plain
    assert ask(model_folder, **tier) == (plain[0], 56, 0)
    files = sorted(tmp_path.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        damage(path)
    output, cached, failures = ask(model_folder, **tier)
    assert output == plain[0]
    assert cached == 0
    assert failures > 0
    assert ask(model_folder, **tier) == (plain[0], 56, 0)  # written anew


@pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")
def test_packed_weights_cut_while_they_are_mapped(tmp_path):
    """The engine's process cannot go on; that is said, and the next one packs them again."""
    config = CONFIG | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(
        model=str(tmp_path), load_format="dummy", executor="cpu", dtype="float32",
        packed_cache_path=str(tmp_path / "packed"),
    )  # fmt: skip

    async def tokens(engine, name):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        request = GenerateRequest(request_id=name, prompt=(1, 2, 3), params=params)
        chunks = [chunk async for chunk in engine.generate(request)]
        return sum((chunk.token_ids for chunk in chunks), ())

    async def main():
        async with AsyncEngine(settings) as engine:
            expected = await tokens(engine, "packs")
        async with AsyncEngine(settings) as engine:
            assert await tokens(engine, "maps") == expected
            (path,) = (tmp_path / "packed").glob("*.packed")
            os.truncate(path, 4096)
            try:
                assert await tokens(engine, "cut") == expected  # given to the next process
            except EngineError as error:
                assert "SIGBUS, as a file that it had mapped was cut" in str(error)
            async with asyncio.timeout(120):
                while not (engine.stats().num_restarts and engine.health().is_ready):
                    await asyncio.sleep(0.02)
            assert await tokens(engine, "after") == expected
            assert path.stat().st_size > 4096

    asyncio.run(main())
