"""The parent's side of `template_worker`: the process is killed and replaced when it overruns."""

import atexit
import functools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ChatTemplateError

# Run and not imported, for jinja2 takes its time.
_WORKER = Path(__file__).with_name("template_worker.py")
_VERBS = {
    "raised": "refuses the conversation",
    "uncompiled": "does not compile",
    "failed": "failed",
}


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What one rendering may cost: CPU seconds, the process's address space, and the prompt.

    ``wall_seconds`` ends a rendering on systems without CPU timers, or when the process hangs.
    """

    cpu_seconds: float = 1.0
    wall_seconds: float = 20.0
    memory_bytes: int = 512 << 20
    output_chars: int = 16 << 20


class TemplateProcess:
    """Renders templates in a child process; safe to share between threads, which take turns."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def takes_parts(self, source: str) -> bool:
        """Whether a template iterates over a message's content; it is compiled on the way.

        Raises:
            ChatTemplateError: it does not compile, or exceeds its limits.
        """
        return self._ask({"source": source}) == "parts"

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text of a template.

        Raises:
            ChatTemplateError: it does not compile, raises, or exceeds its limits.
        """
        return self._ask({"source": source, "variables": variables})

    def _ask(self, request: dict[str, Any]) -> str:
        request["max_output_chars"] = self._limits.output_chars
        with self._lock:
            reply = self._exchange(json.dumps(request).encode())
        if reply is None or reply.get("kind") == "exceeded":
            raise ChatTemplateError(
                "The chat template exceeds its limit of time, memory or recursion."
            )
        if "text" in reply:
            return reply["text"]
        verb = _VERBS[reply["kind"]]
        raise ChatTemplateError(f"The chat template {verb}: {_printable(reply['problem'])}")

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        if self._process is None or self._owner != os.getpid():
            return
        self._process.kill()
        self._process.communicate()
        self._process = None

    def _exchange(self, request: bytes) -> dict[str, str] | None:
        """Send a frame and read the answer; ``None`` if the process ended over it."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._limits.wall_seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(len(request).to_bytes(4, "little") + request)
            process.stdin.flush()
            header = process.stdout.read(4)
            size = int.from_bytes(header, "little")
            data = process.stdout.read(size) if len(header) == 4 else b""
        except BrokenPipeError:
            data, size = b"", 1
        except BaseException:  # Ctrl-C: what is still in the pipe must not answer the next request
            self.close()
            raise
        finally:
            timer.cancel()
        if not data or len(data) != size:
            self.close()
            return None
        reply: dict[str, str] = json.loads(data)
        return reply

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none in this process (which may have been forked)."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            limits = (str(self._limits.memory_bytes), str(self._limits.cpu_seconds))
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
        return self._process


@functools.cache
def template_process(limits: RenderLimits) -> TemplateProcess:
    """The process for these limits, shared by all templates and ended with the program."""
    process = TemplateProcess(limits)
    atexit.register(process.close)
    return process


def _printable(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
