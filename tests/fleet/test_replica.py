"""A replica's process that does not start as it should."""

import asyncio
import signal
import sys

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError
from ridgeline.fleet import replica
from ridgeline.fleet.replica import ReplicaProcess, ReplicaStart
from ridgeline.server.config import ServerConfig


def test_one_that_says_no_url_and_does_not_end_is_ended(monkeypatch):
    execute = asyncio.create_subprocess_exec
    code = "import time; print('No memory.', flush=True); time.sleep(60)"
    monkeypatch.setattr(replica, "_END_S", 0.1)
    monkeypatch.setattr(
        asyncio,
        "create_subprocess_exec",
        lambda *_, **pipes: execute(sys.executable, "-c", code, **pipes),
    )

    async def start():
        process = ReplicaProcess(ReplicaStart(EngineConfig(), ServerConfig()))
        with pytest.raises(EngineError, match="No memory") as caught:
            await asyncio.wait_for(process.start(), 10)
        assert caught.value.exit_code == EngineError.exit_code
        assert await process.wait() == -signal.SIGKILL

    asyncio.run(start())
