"""A real Redis server on a Unix socket, which tests kill, stop and fill."""

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis


class RedisServer:
    """``redis-server`` without a port; its folder is short enough for a socket's name."""

    def __init__(self, *options):
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.socket = Path(self._folder.name) / "s"
        self.url = f"unix://{self.socket}"
        self._options = ("--save", "", "--appendonly", "no", *options)
        self.process = None
        self.start()

    def start(self):
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self._folder.name)
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            try:
                self.client().ping()
                return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                time.sleep(0.005)
        raise AssertionError("redis-server has not started.")

    def client(self, **settings):
        return redis.Redis(unix_socket_path=str(self.socket), **settings)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        self.kill()
        self._folder.cleanup()


def start_redis(*options):
    if shutil.which("redis-server") is None:
        pytest.skip("Needs redis-server (apt install redis-server).")
    return RedisServer(*options)
