"""A wire between two engines that tests make slow, cut, or have change a byte."""

import random
import socket
import threading
import time
from contextlib import suppress

_PIECE = 64 << 10


class FaultyWire:
    """Listens at ``port``, and carries what comes to another port and back.

    ``fault``: of what comes back: "none", "slow" (some KB a second), "flip" (one byte of a piece
    is another one) or "cut".
    """

    def __init__(self, port, target_port, seed=0):
        self.fault = "none"
        self.num_faults = 0
        self.port = port
        self._target = ("127.0.0.1", target_port)
        self._draw = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    answering = socket.create_connection(self._target, timeout=5)
                except OSError:
                    caller.close()
                    continue
                answering.settimeout(None)
                for pair, is_back in (((caller, answering), False), ((answering, caller), True)):
                    threading.Thread(target=self._carry, args=(*pair, is_back), daemon=True).start()

    def _carry(self, source, target, is_back):
        with suppress(OSError), source, target:
            while data := source.recv(_PIECE):
                if is_back and self.fault != "none" and len(data) > 1000:
                    data = self._spoiled(data)
                target.sendall(data)

    def _spoiled(self, data):
        self.num_faults += 1
        match self.fault:
            case "slow":
                time.sleep(0.3)
            case "flip":
                changed = bytearray(data)
                changed[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
                return bytes(changed)
            case "cut":
                raise OSError("cut")
        return data
