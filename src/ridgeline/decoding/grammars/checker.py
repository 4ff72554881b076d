"""The parent's side of `check_worker`: a process that overruns is gone, and another is started."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from ridgeline.decoding.grammars import check_worker

NUM_PROCESSES = 2
CPU_SECONDS = 0.8
WALL_SECONDS = 10.0  # where there are no CPU timers, or a process hangs
MEMORY_BYTES = 2 << 30
MAX_GRAMMAR_BYTES = 64 << 20
BYTES_PER_CHAR = 32  # of a grammar's source, where the C library does not say what it takes
TOO_MUCH = "it takes too much time or memory"


class GrammarChecker:
    """Says whether grammars can be compiled within limits; safe to use from several threads.

    ``special`` are the texts of special tokens, which grammars may name; the processes have a small
    vocabulary of their own, with other ids for them.
    """

    def __init__(self, special: Sequence[str], limits: Mapping[str, int]) -> None:
        self._fixed = {"special": list(special), "limits": dict(limits)}
        self.special: Mapping[str, int] = {
            text: check_worker.FIRST_SPECIAL + index for index, text in enumerate(special)
        }
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(_Process())

    def tried(self, grammar: str) -> tuple[str, int]:
        """What is wrong with a grammar, empty if nothing is, and the bytes that it takes."""
        request = json.dumps(self._fixed | {"grammar": grammar}).encode()
        process = self._idle.get()
        try:
            problem, num_bytes = process.ask(request)
        finally:
            self._idle.put(process)
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


class _Process:
    """One child, started when it is needed. It ends when its input does, as ours ends."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> tuple[str, int | None]:
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(WALL_SECONDS, child.kill)
        timer.start()
        try:
            child.stdin.write(len(request).to_bytes(4, "little") + request)
            child.stdin.flush()
            size = int.from_bytes(child.stdout.read(4), "little")
            data = child.stdout.read(size)
        except BrokenPipeError:
            data = b""
        finally:
            timer.cancel()
        if not data or len(data) != size:
            self.close()
            return TOO_MUCH, None
        reply = json.loads(data)
        return reply["problem"], reply["num_bytes"]

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", check_worker.__file__, str(MEMORY_BYTES), str(CPU_SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._child
