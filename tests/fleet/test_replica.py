"""A replica's process that does not start as it should."""

import asyncio
import os
import signal
import subprocess
import sys
import time

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


def test_replicas_that_are_ended_as_they_start_leave_no_key(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", "serve", "-dp", "2", "--port", "0"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.glob("ridgeline-*/router-key")):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)  # its loop runs, and so may replicas
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not list(tmp_path.iterdir())
