"""Request logs: one line of escaped JSON each, with neither prompts nor keys."""

import json
import logging
import sys
import time

from ridgeline.server.context import Call

_log = logging.getLogger("ridgeline.requests")


def setup_request_log() -> None:
    """Write request lines to standard error, apart from other logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.handlers[:] = [handler]
    _log.setLevel(logging.INFO)
    _log.propagate = False


def log_request(
    method: str, call: Call | None, request_id: str, status: int, seconds: float
) -> None:
    """One line; JSON escapes every control character, so a line is a line."""
    entry: dict[str, object] = {
        "time": round(time.time(), 3),
        "request_id": request_id,
        "method": method[:16],
        "route": call.path if call else "refused",
        "status": status,
        "seconds": round(seconds, 4),
    }
    if call is not None:
        entry |= {
            "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 4),
            "tenant": call.caller.tenant,
            "prompt_tokens": call.prompt_tokens,
            "cached_tokens": call.cached_tokens,
            "output_tokens": call.output_tokens,
            "outcome": call.outcome,
        }
    _log.info("%s", json.dumps(entry))
