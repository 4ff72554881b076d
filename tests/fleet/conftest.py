import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.reliability.process import ServeProcess, free_port
from tests.server.conftest import roomy_folder

__all__ = ["roomy_folder"]

KEY = bytes(range(32))


@pytest.fixture(scope="session")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


class RouteProcess:
    """``ridgeline route`` in a process of its own."""

    def __init__(self, log, *options, port=None):
        self.port, self.options = port or free_port(), options
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = open(log, "ab")  # noqa: SIM115
        command = [sys.executable, "-m", "ridgeline", "route", "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def client(self, **settings):
        return httpx.Client(base_url=self.url, timeout=600, **settings)

    def wait_ready(self, num_up, seconds=300):
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            try:
                answer = httpx.get(f"{self.url}/ready").json()
                if sum(each["up"] for each in answer["engines"]) >= num_up:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, Path(self.log.name).read_text()[-3000:]
            time.sleep(0.02)
        raise AssertionError(Path(self.log.name).read_text()[-3000:])

    def again(self):
        """One like it, killed by SIGKILL, on its port."""
        self.process.kill()
        self.process.wait()
        self.log.close()
        return RouteProcess(self.log.name, *self.options, port=self.port)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)
        self.log.close()


class Fleet:
    """Engines, and a router in front of them; `kill` is SIGKILL for a server and its engine."""

    def __init__(self, model, folder, key_file, *, count=2, options=(), serve=(), serve_each=None):
        self._start = lambda number, port=None: ServeProcess(
            model, folder / f"engine-{number}", "--router-key-file", str(key_file),
            "--no-log-requests", *serve, *(serve_each(number) if serve_each else ()), port=port,
        )  # fmt: skip
        self.engines = [self._start(number) for number in range(count)]
        chosen = [word for each in self.engines for word in ("--engine", each.url)]
        keys = ("--router-key-file", str(key_file))
        self.router = RouteProcess(folder / "router.log", *chosen, *keys, *options)

    def wait(self):
        self.router.wait_ready(len(self.engines))

    def kill(self, number):
        for process in reversed(self.engines[number].family()):
            os.kill(process.pid, signal.SIGKILL)
        self.engines[number].process.wait()

    def restart(self, number):
        """Start a killed engine again on its port, without waiting for it."""
        self.engines[number].close()
        self.engines[number] = self._start(number, self.engines[number].port)

    def close(self):
        for each in self.engines:  # first, so that nothing is left if the router does not end
            each.close()
        self.router.close()


@contextmanager
def fleet_of(model, folder, key_file, **settings):
    fleet = Fleet(model, folder, key_file, **settings)
    try:
        fleet.wait()
        yield fleet
    finally:
        fleet.close()


class RefusedError(AssertionError):
    """Another status than 200."""


def stream(client, path, body, *, on_event=None):
    """The bytes of a stream; ``on_event`` hears of each piece as it comes, and of its engine."""
    parts = []
    with client.stream("POST", path, content=json.dumps({**body, "stream": True})) as response:
        if response.status_code != 200:
            raise RefusedError(response.status_code, response.read())
        engine = int(response.headers.get("x-ridgeline-engine", -1))  # asked itself
        for part in response.iter_raw():
            parts.append(part)
            if on_event is not None:
                on_event(len(parts), engine)
    return b"".join(parts)
