"""The parent's side of `template_worker`: the process is killed and replaced when it overruns."""

import atexit
import functools
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.child_process import ChildProcess
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
        self._child = ChildProcess(
            ["-I", str(_WORKER), str(limits.memory_bytes), str(limits.cpu_seconds)]
        )

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
            replies = self._child.exchange(
                json.dumps(request).encode(), wall_seconds=self._limits.wall_seconds
            )
        reply: dict[str, str] = json.loads(replies[0]) if replies else {"kind": "exceeded"}
        if reply.get("kind") == "exceeded":
            raise ChatTemplateError(
                "The chat template exceeds its limit of time, memory or recursion."
            )
        if "text" in reply:
            return reply["text"]
        verb = _VERBS[reply["kind"]]
        raise ChatTemplateError(f"The chat template {verb}: {_printable(reply['problem'])}")

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        self._child.close()


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
