"""Optional packages: the command that brings them."""

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """What installs one of Ridgeline's extras: from the folder that it was installed from, if any
    (``direct_url.json``, PEP 610)."""
    source = "ridgeline"
    with suppress(PackageNotFoundError, ValueError, KeyError):
        text = distribution("ridgeline").read_text("direct_url.json") or "{}"
        path = unquote(urlsplit(json.loads(text)["url"]).path)
        if Path(path, "pyproject.toml").is_file():
            source = path
    return f"pip install '{source}[{extra}]'"
