"""Processes of ranks on one machine: started with their descriptors, and ended."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from ridgeline.core.host import how_it_ended
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.executors.distributed.pipe import Wires
from ridgeline.kernels.cpu.group import shared_memory

# What a rank's process runs. It reads models as the engine does, which this package may not import.
_MODULE = "ridgeline.engine.rank_main"


class LocalRank:
    """A rank's process on this machine."""

    where = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def how_it_ended(self) -> str | None:
        """A sentence on it; ``None`` while it runs."""
        code = self._process.poll()
        return None if code is None else how_it_ended(code)

    def kill(self) -> None:
        """Ranks may be waiting for each other where no signal but this one reaches them."""
        self._process.kill()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()


def start_ranks(
    layout: ParallelLayout,
    streams: Mapping[int, socket.socket],
    wires: Mapping[int, Wires],
    num_threads: int,
) -> dict[int, LocalRank]:
    """Start those ranks of a layout that are on this machine.

    The thread that calls must live as long as they do: Linux ends them with it.

    Args:
        streams: each rank's end of the connection to its driver, which is closed here; the driver
            says `messages.Begin` over it.
        wires: each rank's sockets to others, which are closed here.

    Raises:
        MachineError: there is no memory for them to share.
        OSError: a process cannot be started.
    """
    started: dict[int, LocalRank] = {}
    memories: dict[int, int] = {}  # of stages, whose ranks share it
    try:
        for rank, stream in streams.items():
            stage = rank // layout.stage_ranks
            if stage not in memories:
                memories[stage] = shared_memory(layout.stage_ranks)
            started[rank] = _start(stream, memories[stage], wires[rank], num_threads)
    except BaseException:
        for process in started.values():
            process.kill()
            process.wait()
        raise
    finally:
        for end in (
            *memories.values(),
            *(end for each in wires.values() for end in each.descriptors),
        ):
            os.close(end)
        for stream in streams.values():
            stream.close()
    return started


def _start(stream: socket.socket, memory: int, wires: Wires, num_threads: int) -> LocalRank:
    level = logging.getLogger("ridgeline").getEffectiveLevel()
    process = subprocess.Popen(
        [
            sys.executable, "-P", *["-O"] * sys.flags.optimize, "-m", _MODULE,
            str(stream.fileno()), str(memory), str(os.getpid()), str(level),
            msgspec.json.encode(wires).decode(),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=(stream.fileno(), memory, *wires.descriptors),
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
        start_new_session=True,  # Ctrl-C at a terminal is for the driver
    )  # fmt: skip
    return LocalRank(process)
