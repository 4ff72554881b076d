"""``ridgeline serve`` as users run it: a process of its own, with an engine process."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil


class ServeProcess:
    """A running server, its engine process, and what they wrote."""

    def __init__(self, model, data_dir, *options, port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = open(f"{data_dir}.log", "ab")  # noqa: SIM115
        command = [
            sys.executable, "-m", "ridgeline", "serve", str(model), "--port", str(self.port),
            "--dtype", "float32", "--max-num-seqs", "8", "--data-dir", str(data_dir),
            "--served-model-name", "tiny", *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def client(self, **settings):
        return httpx.Client(base_url=self.url, timeout=300, **settings)

    def wait_ready(self, seconds=300):
        """Seconds until /ready says 200."""
        started = time.monotonic()
        with self.client() as client:
            while time.monotonic() < started + seconds:
                try:
                    if client.get("/ready").status_code == 200:
                        return time.monotonic() - started
                except httpx.TransportError:
                    assert self.process.poll() is None, Path(self.log.name).read_text()[-3000:]
                time.sleep(0.02)
        raise AssertionError(Path(self.log.name).read_text()[-3000:])

    def wait_restarted(self, dead, seconds=300):
        """Seconds until an engine process other than ``dead`` is there and /ready says 200.

        A server that has not yet noticed a death is ready still.
        """
        started = time.monotonic()
        while not self._has_newer_engine(dead):
            assert time.monotonic() < started + seconds, "no engine was started"
            time.sleep(0.02)
        return time.monotonic() - started + self.wait_ready(seconds)

    def _has_newer_engine(self, dead):
        try:
            return self.engine().create_time() > dead.create_time()
        except (psutil.NoSuchProcess, ValueError):  # a child has just ended, or there is none
            return False

    def engine(self):
        """The engine process: the one that holds the model."""
        children = psutil.Process(self.process.pid).children()
        return max(children, key=lambda child: child.memory_info().rss)

    def family(self):
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def terminate(self, seconds=120):
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self):
        if self.process.poll() is None:
            for process in reversed(self.family()):
                process.kill()
            self.process.wait()
        self.log.close()


_GIVEN_PORTS = set()


def free_port():
    """One that nobody listens at, and that none of this process's servers is about to."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        if port not in _GIVEN_PORTS:
            _GIVEN_PORTS.add(port)
            return port


@contextmanager
def serve_process(model, data_dir, *options, port=None):
    server = ServeProcess(model, data_dir, *options, port=port)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()
