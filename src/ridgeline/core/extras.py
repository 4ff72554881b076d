"""Optional packages: the command that brings them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_CPU_BUILD = "first '{}' from PyTorch's index of CPU builds, which are smaller by gigabytes"


def install_command(extra: str) -> str:
    """What installs one of Ridgeline's extras: from the folder that it was installed from, if any
    (``direct_url.json``, PEP 610)."""
    source = "ridgeline"
    installed = _installed()
    with suppress(ValueError, KeyError):
        text = (installed and installed.read_text("direct_url.json")) or "{}"
        path = unquote(urlsplit(json.loads(text)["url"]).path)
        if Path(path, "pyproject.toml").is_file():
            source = path
    command = f"pip install '{source}[{extra}]'"
    pin = _torch_pin(installed, extra)
    return f"{command} ({_CPU_BUILD.format(pin)})" if pin else command


def _installed() -> "Distribution | None":
    """What pip knows of us; `importlib.metadata` brings the parser of e-mail."""
    from importlib.metadata import PackageNotFoundError, distribution

    with suppress(PackageNotFoundError):
        return distribution("ridgeline")
    return None


def _torch_pin(installed: "Distribution | None", extra: str) -> str | None:
    """Which versions of torch an extra needs, if CPU builds of it are enough."""
    for line in (installed and installed.requires) or ():
        requirement, _, marker = line.partition(";")
        if extra != "gpu" and requirement.startswith("torch") and f'"{extra}"' in marker:
            return requirement.strip()
    return None
