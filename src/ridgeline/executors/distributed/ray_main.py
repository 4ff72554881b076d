"""The process that has Ray start workers: ``python -m ridgeline.executors.distributed.ray_main``.

Standard input brings what is to be started, and ends with the driver of the ranks: then the workers
end, too. Standard output gets a line for each worker that is not there, or not any more.
"""

import os
import struct
import sys
import threading
from typing import Any

import msgspec

from ridgeline.core import wire
from ridgeline.core.doors import Address
from ridgeline.core.errors import RidgelineError
from ridgeline.core.ray_cluster import RayPlace, start_actors
from ridgeline.executors.distributed.worker import RayWorker


class StartWorkers(msgspec.Struct):
    """Workers that join the driver at an address; without a host, that of this node."""

    place: RayPlace
    driver: Address
    key: bytes


def main() -> None:
    """Start workers, and let go of them when standard input ends."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is not for the driver
    (size,) = struct.unpack("<I", sys.stdin.buffer.read(4))
    start = wire.decode(sys.stdin.buffer.read(size), StartWorkers)
    threading.Thread(target=_start, args=(start, told), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # Ray ends what its driver has started


def _start(start: StartWorkers, told: Any) -> None:
    try:
        actors, cpus = start_actors(start.place, RayWorker)
    except RidgelineError as error:
        print(str(error).replace("\n", " "), file=told)
        return
    import ray

    host, port = start.driver
    driver = (host or ray.util.get_node_ip_address(), port)
    pending = [actor.join.remote(driver, start.key, cpus) for actor in actors]
    while pending:
        (done, *_), pending = ray.wait(pending)
        try:
            why = ray.get(done)
        except ray.exceptions.RayError as error:
            why = str(error)
        print(" ".join(why.split()), file=told)


if __name__ == "__main__":
    main()
