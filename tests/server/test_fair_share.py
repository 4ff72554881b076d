"""Two keys on one server: the flood of one does not become the wait of the other."""

import asyncio
import hashlib
import json
import statistics
import time

import httpx
import pytest
from tests.server.running import running

FLOOD = 200


@pytest.fixture
def shared(roomy_folder, tmp_path):
    """Keys ``many`` and ``few`` without limits, and 4 places for sequences."""
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("many", "few")}
    (tmp_path / "keys.toml").write_text(
        "".join(f'[[key]]\nname = "{name}"\nsha256 = "{each}"\n' for name, each in digests.items())
    )
    engine = {"max_num_seqs": 4, "scheduling_policy": "priority", "max_model_len": 256}
    with running(
        roomy_folder,
        data_dir=tmp_path / "data",
        engine=engine,
        api_key_file=str(tmp_path / "keys.toml"),
        max_queue=1000,
    ) as server:
        yield server


async def first_token_s(client, key, number):
    """Seconds to the first token of a stream, which is read to its end."""
    body = {
        "prompt": f"the cat {number}",
        "max_tokens": 30,
        "ignore_eos": True,
        "stream": True,
    }
    began_s, first_s, ended = time.monotonic(), None, False
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line.removeprefix("data: "))
                first_s = first_s or time.monotonic() - began_s
            ended = ended or line == "data: [DONE]"
    assert ended
    return first_s


@pytest.mark.slow
@pytest.mark.alone
def test_a_flood_of_streams_is_served_whole_and_delays_nobody_else(shared, counted):
    async def main():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=shared.url, timeout=300, limits=limits) as client:
            flood = [
                asyncio.create_task(first_token_s(client, "many", number))
                for number in range(FLOOD)
            ]
            while shared.server.engine.stats().num_waiting < FLOOD // 2:
                await asyncio.sleep(0.05)
            few = [await first_token_s(client, "few", FLOOD + number) for number in range(5)]
            assert not flood[-1].done()
            return await asyncio.gather(*flood), few

    many_s, few_s = asyncio.run(main())
    assert max(few_s) < statistics.median(many_s) / 4, (few_s, statistics.median(many_s))
    assert shared.server.limits.running == 0
    counted(FLOOD)
