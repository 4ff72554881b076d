"""The server of KV for other engines, and who comes to it at a bad time."""

import math
import socket
import threading
import time

from tests.kvcache.test_peer_tier import serving

from ridgeline.core.errors import NetworkError
from ridgeline.kvcache.tiers import peer_server
from ridgeline.kvcache.tiers.coming import ComingEntries


def test_who_waits_for_an_entry_that_is_coming_waits_no_longer_than_for_that():
    coming = ComingEntries()
    for key in (b"a", b"b", b"c"):
        coming.add(key)
    coming.discard([b"a", b"c"])
    assert [key in coming for key in (b"a", b"b", b"c")] == [False, True, False]
    coming.wait(b"a", math.inf)
    coming.wait(b"b", time.monotonic() + 0.01)
    assert b"b" in coming
    waiter = threading.Thread(target=coming.wait, args=(b"b", time.monotonic() + 60))
    waiter.start()
    coming.discard([b"b"])
    waiter.join(10)
    assert not waiter.is_alive()


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
