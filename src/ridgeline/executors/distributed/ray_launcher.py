"""Workers that Ray starts, seen from the driver of their ranks."""

import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from ridgeline.core import wire
from ridgeline.core.config import EngineConfig
from ridgeline.core.doors import Address
from ridgeline.core.ray_cluster import RayPlace, check_ray
from ridgeline.executors.distributed.ray_main import StartWorkers

_END_S = 5.0


class RayLauncher:
    """Has Ray start workers that join at an address with a key.

    Ray's driver is a process of its own: none of Ray's threads is in the engine's, and the workers
    end with it, which ends with this process however this one ends.

    Args:
        on_lost: is told, in a thread, why a worker is not there.

    Raises:
        SettingsError: Ray is not installed.
    """

    def __init__(
        self, config: EngineConfig, driver: Address, key: bytes, on_lost: Callable[[str], None]
    ) -> None:
        check_ray()
        place = RayPlace(
            address=config.ray_address,
            count=config.workers,
            cpus=config.ray_cpus,
            wait_s=config.worker_wait_s,
        )
        data = wire.encode(StartWorkers(place=place, driver=driver, key=key))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ridgeline.executors.distributed.ray_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at a terminal is for the driver
        )
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended: what it said is read
            self._process.stdin.write(struct.pack("<I", len(data)) + data)
            self._process.stdin.flush()
        threading.Thread(target=self._listen, args=(on_lost,), daemon=True).start()

    def close(self) -> None:
        """End the workers."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _listen(self, on_lost: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            on_lost(line.decode(errors="replace").strip())
        on_lost("the process that has Ray start workers ended.")
