"""The time of day jumps, by a year or an hour, in both directions: no duration changes."""

import asyncio
import json
import time

import pytest
from tests.kvcache.test_tiers import make_entry
from tests.reliability.test_batches import Store
from tests.server.key_digests import digest
from tests.server.running import running
from tests.server.test_jobs import finished, start
from tests.server.test_kept_responses import kept, store, there

from ridgeline.kvcache.tiers import DiskTier, RamTier
from ridgeline.server.jobs import worker

HOUR_S, YEAR_S = 3600.0, 365 * 86400.0
KEYS = """
[[key]]
name = "limited"
sha256 = "{limited}"
requests_per_minute = 3
[[key]]
name = "free"
sha256 = "{free}"
"""


@pytest.fixture
def clocks(monkeypatch):
    """Jumps of the time of day, and seconds that pass, beside the real ones."""
    real, steady, by_id = time.time, time.monotonic, time.clock_gettime
    jumps = {"day": 0.0, "passed": 0.0}
    monkeypatch.setattr(time, "time", lambda: real() + jumps["day"] + jumps["passed"])
    monkeypatch.setattr(time, "monotonic", lambda: steady() + jumps["passed"])
    monkeypatch.setattr(time, "clock_gettime", lambda which: by_id(which) + jumps["passed"])
    return jumps


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_kv_is_kept_as_long_as_it_should_be(tmp_path, clocks, kind, jump_s):
    ttl = {"ttl_s": 60.0}
    tier = RamTier(10**6, **ttl) if kind == "ram" else DiskTier(tmp_path, 10**6, **ttl)
    first, second = make_entry(0), make_entry(1)
    tier.put(first)
    clocks["day"] = jump_s
    tier.put(second)
    clocks["passed"] = 50.0
    tier.expire()
    assert tier.usage().num_entries == 2
    clocks["passed"] = 70.0
    tier.expire()
    assert tier.usage().num_entries == 0


def test_files_of_a_clock_that_was_ahead_expire_as_well(tmp_path, clocks):
    clocks["day"] = YEAR_S
    DiskTier(tmp_path, 10**6).put(make_entry(0))
    clocks["day"] = 0.0
    tier = DiskTier(tmp_path, 10**6, ttl_s=60.0)
    assert tier.usage().num_entries == 1
    clocks["passed"] = 70.0
    tier.expire()
    assert tier.usage().num_entries == 0


def test_a_batch_is_never_given_more_than_its_window(clocks):
    row = {"created": int(time.time()), "expires": int(time.time()) + 86400}
    clocks["day"] = -YEAR_S
    assert worker._left_s(row) == 86400
    clocks["day"] = YEAR_S
    assert worker._left_s(row) == 0


def test_kept_responses_live_as_long_as_they_should(tmp_path, clocks):
    async def live():
        with store(tmp_path) as found:
            await found.put("a", kept(0), ttl_s=60)
            for clocks["day"] in (YEAR_S, -YEAR_S, HOUR_S, 0.0):
                await found.purge()
                assert await there(found, "a", (0,)) == [0], clocks
            clocks["day"] = -YEAR_S
            await found.put("a", kept(1), ttl_s=60)
            clocks.update(day=YEAR_S, passed=50.0)
            assert await there(found, "a", (0, 1)) == [0, 1]
            clocks["passed"] = 61.0
            await found.purge()
            assert await there(found, "a", (0, 1)) == []

    asyncio.run(live())


def test_a_batch_that_waits_has_its_window_still(tmp_path, clocks):
    async def wait():
        jobs = Store(tmp_path)
        over, waiting = await jobs.start(), await jobs.start()
        await jobs.batches.cancel("t", over)
        lease, _ = await jobs.batches.claim(over)
        assert await jobs.batches.finish(lease, "cancelled", [])
        before = await jobs.batches.get("t", over)
        clocks["day"] = YEAR_S
        _, row = await jobs.batches.claim(waiting)
        assert 7 < worker._left_s(row) <= 9
        assert await jobs.batches.get("t", over) == before
        jobs.database.close()

    asyncio.run(wait())


def test_a_server_goes_on(roomy_folder, tmp_path, monkeypatch):
    """Streams, limits by the minute, time limits and a batch, while the time of day jumps."""
    real, jump = time.time, {"s": 0.0}
    monkeypatch.setattr(time, "time", lambda: real() + jump["s"])
    keys = KEYS.format(limited=digest("limited"), free=digest("free"))
    (tmp_path / "keys.toml").write_text(keys)
    settings = {"data_dir": tmp_path / "data", "api_key_file": str(tmp_path / "keys.toml")}
    with (
        running(roomy_folder, **settings) as server,
        server.client(headers={"x-api-key": "free"}) as free,
        server.client(headers={"x-api-key": "limited"}) as limited,
    ):
        body = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        expected = free.post("/v1/completions", json=body).json()["choices"][0]["text"]
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            for i in range(12)
        ]
        jump["s"] = -YEAR_S
        batch = start(free, "\n".join(map(json.dumps, lines)).encode())
        while free.get(f"/v1/batches/{batch['id']}").json()["status"] == "validating":
            time.sleep(0.01)
        text = ""
        with free.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            for number, line in enumerate(response.iter_lines()):
                jump["s"] = (-1) ** number * (YEAR_S if number % 3 else HOUR_S)
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == expected
        statuses = []
        for jump["s"] in (0.0, YEAR_S, -YEAR_S, HOUR_S, -HOUR_S):
            answer = limited.post("/v1/completions", json=body | {"max_tokens": 1})
            statuses.append(answer.status_code)
        assert statuses == [200, 200, 200, 429, 429]
        assert 1 <= int(answer.headers["retry-after"]) <= 61
        assert finished(free, batch["id"])["request_counts"]["completed"] == 12
        assert free.get("/ready").status_code == 200
