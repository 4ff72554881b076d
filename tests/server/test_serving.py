"""Servers that cannot do their work: an engine that is given up, a model that is damaged."""

import asyncio
import logging

import httpx
import pytest
from tests.server.running import running

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.stats import EngineStatus, Health
from ridgeline.server.config import ServerConfig
from ridgeline.server.context import Server
from ridgeline.server.jobs.database import Database
from ridgeline.server.jobs.jobs import Jobs
from ridgeline.server.serving import open_listener, run


def test_a_server_ends_with_an_error_when_its_engine_is_given_up(model_folder, tmp_path):
    """So that whoever supervises it starts another one."""
    config = ServerConfig(port=0, log_requests=False)

    async def main():
        async with AsyncEngine(EngineConfig(model=str(model_folder)), in_process=True) as engine:
            server = Server(engine, config, Jobs(Database(tmp_path)))

            def announce(line):
                if line == "Ready.":
                    lost = Health(status=EngineStatus.DEAD, reason="The engine is gone.")
                    engine._host.health = lost

            with open_listener(config) as listener, pytest.raises(EngineError, match="gone"):
                await asyncio.wait_for(run(server, listener, announce), 30)

    asyncio.run(main())


def test_a_damaged_model_is_not_ready_and_its_errors_are_said_and_logged(
    damaged_folder, tmp_path, caplog
):
    with (
        caplog.at_level(logging.ERROR),
        running(damaged_folder, data_dir=tmp_path) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert "not finite" in ready.json()["reason"]
        answers = [
            http.post("/v1/completions", json={"prompt": "the cat"}),
            http.post("/v1/embeddings", json={"input": "the cat"}),
        ]
    for answer in answers:
        assert answer.status_code == 500
        assert "not finite" in answer.json()["error"]["message"]
    assert sum("not finite" in record.getMessage() for record in caplog.records) == 3
