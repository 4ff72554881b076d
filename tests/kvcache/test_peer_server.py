"""The server of KV for other engines, and who comes to it at a bad time."""

import socket
import threading

from tests.kvcache.test_peer_tier import serving

from ridgeline.core.errors import NetworkError
from ridgeline.kvcache.tiers import peer_server


def test_who_is_let_in_while_a_server_closes_is_let_go_of(monkeypatch):
    class Slow:
        """Takes one caller, who stood before it when it was closed."""

        port = 1

        def __init__(self, address, key):
            self._closed, self._waiting = threading.Event(), [ours]

        def take(self, purpose, until_s):
            self._closed.wait()
            if self._waiting:
                return self._waiting.pop()
            raise NetworkError("closed")

        def close(self):
            self._closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    monkeypatch.setattr(peer_server, "Door", Slow)
    with theirs:
        with serving(1):
            pass
        theirs.settimeout(2)
        assert theirs.recv(1) == b""
