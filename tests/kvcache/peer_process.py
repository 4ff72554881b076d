"""An engine's end among peers in a process of its own, which tests kill and stop."""

import os
import signal
import socket
import subprocess
import sys

from ridgeline.kvcache.tiers import PeerServer, RamTier

KEY = b"p" * 32


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class PeerProcess:
    """Gives out `make_entry` of the first ``count`` numbers."""

    def __init__(self, count, *, size=1000):
        self.address = ("127.0.0.1", free_port())
        self._arguments = [str(self.address[1]), str(count), str(size)]
        self.start()

    def start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvcache.peer_process", *self._arguments],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout.readline() == b"ready\n"

    def pause(self):
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    from tests.kvcache.test_tiers import make_entry

    port, count, size = map(int, sys.argv[1:])
    ram = RamTier(2**30)
    ram.put_all([make_entry(number, size=size) for number in range(count)])
    PeerServer(("127.0.0.1", port), ram, key=KEY, digest="model")
    print("ready", flush=True)
    signal.pause()
