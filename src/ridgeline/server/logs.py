"""Request logs: one line each, with neither prompts nor keys; JSON, or text on a terminal."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from ridgeline.server.context import Call

_log = logging.getLogger("ridgeline.requests")
_to_terminal = False
_MAX_PATH_CHARS = 200
_MAX_ERROR_CHARS = 300


def setup_request_log() -> None:
    """Write request lines to standard error, apart from other logs."""
    global _to_terminal
    _to_terminal = sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.handlers[:] = [handler]
    _log.setLevel(logging.INFO)
    _log.propagate = False


def log_request(
    method: str,
    call: Call | None,
    request_id: str,
    status: int,
    seconds: float,
    path: str | None = None,
) -> None:
    """One line; JSON escapes every control character, so a line is a line.

    ``path``: as it was sent, for what has no route.
    """
    entry: dict[str, object] = {
        "time": round(time.time(), 3),
        "request_id": request_id,
        "method": method[:16],
        "route": call.path if call else "refused",
        "status": status,
        "seconds": round(seconds, 4),
    }
    if path is not None:
        entry["path"] = path[:_MAX_PATH_CHARS]
    if call is not None:
        entry |= {
            "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 4),
            "tenant": call.caller.tenant,
            "prompt_tokens": call.prompt_tokens,
            "cached_tokens": call.cached_tokens,
            "output_tokens": call.output_tokens,
            "outcome": call.outcome,
        }
        if call.problem:
            entry["error"] = call.problem[:_MAX_ERROR_CHARS]
    _log.info("%s", as_text(entry) if _to_terminal else json.dumps(entry))


def as_text(entry: Mapping[str, Any]) -> str:
    """An entry for people: the time of day, what was asked, how it ended, and what it took."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry["time"]))
    route = json.dumps(entry["path"])[1:-1] if "path" in entry else entry["route"]
    parts = [f"{clock} {entry['method']} {route} {entry['status']} {entry['seconds']:.3f} s"]
    if entry.get("ttft_s") is not None:
        parts.append(f"TTFT {entry['ttft_s'] * 1e3:.0f} ms")
    if entry.get("prompt_tokens"):
        cached = f" ({entry['cached_tokens']:,} cached)" if entry["cached_tokens"] else ""
        parts.append(f"{entry['prompt_tokens']:,}{cached} + {entry['output_tokens']:,} tokens")
    if entry.get("tenant"):
        parts.append(json.dumps(entry["tenant"])[1:-1])
    if entry.get("outcome", "ok") not in ("ok", f"error {entry['status']}"):
        parts.append(entry["outcome"])
    if "error" in entry:
        parts.append(json.dumps(entry["error"], ensure_ascii=False)[1:-1])
    return " · ".join(parts)
