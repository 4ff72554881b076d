"""The engine's process: ``python -m ridgeline.engine.process_main FOLDER PARENT LEVEL``.

It logs from the parent's level on.

Standard input brings the configuration, and then nothing: its end means that the parent is gone.
"""

import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

import zmq

from ridgeline.core import wire
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import RidgelineError
from ridgeline.core.host import die_with
from ridgeline.engine.engine import Engine
from ridgeline.engine.messages import Failed, Loading, Pulse
from ridgeline.engine.socket_channel import SocketChannel
from ridgeline.engine.worker import Worker

PULSE_S = 1.0
_LOADING_EVERY_S = 0.1


def main() -> int:
    """Load the model and serve until told to stop; 1 if the engine failed."""
    folder, parent = sys.argv[1], int(sys.argv[2])
    logging.getLogger("ridgeline").setLevel(int(sys.argv[3]))
    die_with(parent)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent says when
        signal.signal(ignored, signal.SIG_IGN)
    (size,) = struct.unpack("<I", _read(sys.stdin.buffer, 4))
    config = wire.decode(_read(sys.stdin.buffer, size), EngineConfig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = SocketChannel(context, f"ipc://{folder}/events")
    life = _Life()
    threading.Thread(target=_pulse, args=(context, folder, life), daemon=True).start()
    try:
        engine = Engine(config, progress=_loading_events(channel))
    except RidgelineError as error:
        channel.last_words(Failed(error=type(error).__name__, message=str(error)))
        return 1
    life.progress = engine.loop.progress
    life.cpu_s = lambda: time.process_time() + engine.executor.cpu_s
    gc.collect()
    gc.freeze()  # a full collection would look at the whole model's objects, between two tokens
    failure = Worker(engine, receive=channel.receive, send=channel.send).run()
    if failure is not None:
        channel.last_words(failure)
    channel.close()
    return 0 if failure is None else 1


class _Life:
    """What the pulse tells: the last step, whether there is something to do, processor time."""

    progress: Callable[[], tuple[int, bool]] = staticmethod(lambda: (0, True))
    cpu_s: Callable[[], float] = staticmethod(time.process_time)


def _pulse(context: "zmq.Context[zmq.Socket[bytes]]", folder: str, life: _Life) -> None:
    """Tell the parent every second that this process runs; end it when the parent is gone.

    Processor time is in it, because a long step completes nothing for a minute and yet computes.
    """
    pulses = context.socket(zmq.PAIR)
    pulses.set(zmq.LINGER, 0)
    pulses.set(zmq.SNDHWM, 8)
    pulses.connect(f"ipc://{folder}/pulses")
    while True:
        step_id, is_busy = life.progress()
        pulse = Pulse(step_id=step_id, is_busy=is_busy, cpu_s=life.cpu_s())
        with contextlib.suppress(zmq.Again):
            pulses.send(wire.encode(pulse), zmq.NOBLOCK)
        ended, _, _ = select.select([sys.stdin.fileno()], [], [], PULSE_S)
        if ended:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


def _loading_events(channel: SocketChannel) -> Callable[[int, int, str], None]:
    last_s = 0.0

    def tell(done: int, total: int, label: str) -> None:
        nonlocal last_s
        now = time.monotonic()
        if now - last_s >= _LOADING_EVERY_S or done == total:
            last_s = now
            channel.send(Loading(done=done, total=total, label=label))

    return tell


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        sys.exit(1)
    return data


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and tearing torch down takes a while
