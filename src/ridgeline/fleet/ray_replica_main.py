"""The process that has Ray start a replica: ``python -m ridgeline.fleet.ray_replica_main PARENT``.

As `replica_main`: standard input brings its settings, standard output gets its URL or why there is
none, and SIGTERM ends it. It ends when the replica does, or its node.
"""

import asyncio
import os
import signal
import struct
import sys
from typing import Any

from ridgeline.core import wire
from ridgeline.core.errors import EngineError, RidgelineError
from ridgeline.core.host import die_with
from ridgeline.core.ray_cluster import start_actors
from ridgeline.fleet.ray_replica import RayReplica, RayReplicaStart


async def serve(start: RayReplicaStart, told: Any) -> int:
    """Serve until SIGTERM, or until the replica is lost.

    Raises:
        RidgelineError: it cannot be started.
    """
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    (actor,), num_cores = start_actors(start.place, RayReplica, max_concurrency=4)
    loop.add_signal_handler(signal.SIGTERM, stopping.set)  # after Ray has set its own
    url = await actor.start.remote(wire.encode(start.start), start.files, num_cores)
    if not url.startswith("http"):
        raise EngineError(url)
    print(url, file=told)
    ended = asyncio.ensure_future(_code(actor))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        return 1
    await actor.end.remote()
    return 0


async def _code(actor: Any) -> int:
    code: int = await actor.wait.remote()
    return code


def main() -> int:
    """Serve until SIGTERM."""
    die_with(int(sys.argv[1]))
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no URL
    (size,) = struct.unpack("<I", sys.stdin.buffer.read(4))
    start = wire.decode(sys.stdin.buffer.read(size), RayReplicaStart)
    try:
        return asyncio.run(serve(start, told))
    except RidgelineError as error:
        print(str(error).replace("\n", " "), file=told)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
