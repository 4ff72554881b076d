"""The parent's side of `check_worker`: a process that overruns is gone, and another is started."""

import json
import queue
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

from ridgeline.core.child_process import ChildProcess
from ridgeline.core.errors import OverloadedError

NUM_PROCESSES = 2
CPU_SECONDS = 0.8
WALL_SECONDS = 10.0  # where there are no CPU timers, or a process hangs
MEMORY_BYTES = 2 << 30
MAX_GRAMMAR_BYTES = 64 << 20
BYTES_PER_CHAR = 32  # of a grammar's source, where the C library does not say what it takes
TOO_MUCH = "it takes too much time or memory"
_FIRST_SPECIAL = 257  # id of the first special token of `check_worker.Bytes`
_WORKER = Path(__file__).with_name("check_worker.py")  # not imported: llguidance takes its time
_ARGUMENTS = ("-I", str(_WORKER), str(MEMORY_BYTES), str(CPU_SECONDS))


class GrammarChecker:
    """Says whether grammars can be compiled within limits; safe to use from several threads.

    ``special`` are the texts of special tokens, which grammars may name; the processes have a small
    vocabulary of their own, with other ids for them.
    """

    def __init__(self, special: Sequence[str], limits: Mapping[str, int]) -> None:
        self._fixed = {"special": list(special), "limits": dict(limits)}
        self.special: Mapping[str, int] = {
            text: _FIRST_SPECIAL + index for index, text in enumerate(special)
        }
        self._idle: queue.SimpleQueue[ChildProcess] = queue.SimpleQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(ChildProcess(_ARGUMENTS))

    def tried(self, grammar: str) -> tuple[str, int]:
        """What is wrong with a grammar, empty if nothing is, and the bytes that it takes.

        Raises:
            OverloadedError: others left it no processor time to find that out.
        """
        request = json.dumps(self._fixed | {"grammar": grammar}).encode()
        process = self._idle.get()
        began_s = monotonic()
        try:
            replies = process.exchange(request, wall_seconds=WALL_SECONDS)
        finally:
            self._idle.put(process)
        if not replies and hasattr(signal, "setitimer") and monotonic() - began_s >= WALL_SECONDS:
            raise OverloadedError(
                "The machine is too busy to try the grammar.", retry_after_s=WALL_SECONDS
            )
        problem: str = TOO_MUCH
        num_bytes: int | None = None
        if replies:
            reply = json.loads(replies[0])
            problem, num_bytes = reply["problem"], reply["num_bytes"]
        if num_bytes is None:
            num_bytes = BYTES_PER_CHAR * len(grammar)
        if num_bytes > MAX_GRAMMAR_BYTES:
            problem = problem or TOO_MUCH
        return problem, max(num_bytes, len(grammar))

    def close(self) -> None:
        """End the processes that are not at work."""
        for _ in range(NUM_PROCESSES):
            process = self._idle.get()
            process.close()
            self._idle.put(process)
