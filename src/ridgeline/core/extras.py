"""Optional packages: the command that brings them."""

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CPU_BUILD = "first '{}' from PyTorch's index of CPU builds, which are smaller by gigabytes"


def install_command(extra: str) -> str:
    """What installs one of Ridgeline's extras: from the folder that it was installed from, if any
    (``direct_url.json``, PEP 610)."""
    source = "ridgeline"
    with suppress(PackageNotFoundError, ValueError, KeyError):
        text = distribution("ridgeline").read_text("direct_url.json") or "{}"
        path = unquote(urlsplit(json.loads(text)["url"]).path)
        if Path(path, "pyproject.toml").is_file():
            source = path
    command = f"pip install '{source}[{extra}]'"
    return f"{command} ({_CPU_BUILD.format(pin)})" if (pin := _torch_pin(extra)) else command


def _torch_pin(extra: str) -> str | None:
    """Which versions of torch an extra needs, if CPU builds of it are enough."""
    with suppress(PackageNotFoundError):
        for line in distribution("ridgeline").requires or ():
            requirement, _, marker = line.partition(";")
            if extra != "gpu" and requirement.startswith("torch") and f'"{extra}"' in marker:
                return requirement.strip()
    return None
