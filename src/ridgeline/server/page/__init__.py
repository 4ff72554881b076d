"""The web page: static files beside this one, and nothing from anywhere else."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ridgeline.server.context import Call
from ridgeline.server.endpoint import Operation
from ridgeline.server.replies import Reply

_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cache-control", b"no-cache"),
)


def page_operations() -> list[Operation]:
    """``/`` and a route for each file of the page; no path is ever made from a request."""
    files = sorted(path for path in _FOLDER.iterdir() if path.suffix in _TYPES)
    return [
        Operation(
            "GET",
            "/" if path.name == "index.html" else f"/page/{path.name}",
            _serving(path.read_bytes(), _TYPES[path.suffix]),
            "The web page",
        )
        for path in files
    ]


def _serving(content: bytes, content_type: str) -> Callable[[Call], Coroutine[Any, Any, Reply]]:
    async def page(_: Call) -> Reply:
        return Reply(body=content, content_type=content_type, headers=_HEADERS)

    return page
