"""A replica's process: ``python -m ridgeline.fleet.replica_main PARENT``.

Standard input brings its settings; standard output gets one line, its URL or why there is none.
"""

import os
import struct
import sys

from ridgeline.core import wire
from ridgeline.core.errors import RidgelineError
from ridgeline.core.host import die_with
from ridgeline.fleet.replica import ReplicaStart
from ridgeline.server.serving import serve


def main() -> int:
    """Serve until SIGTERM."""
    die_with(int(sys.argv[1]))
    (size,) = struct.unpack("<I", sys.stdin.buffer.read(4))
    start = wire.decode(sys.stdin.buffer.read(size), ReplicaStart)
    if start.processors:
        os.sched_setaffinity(0, start.processors)
    try:
        serve(start.engine, start.server, announce=lambda _: None, on_listening=_tell)
    except RidgelineError as error:
        _tell(str(error))
        return error.exit_code
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
