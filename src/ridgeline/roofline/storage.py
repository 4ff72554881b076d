"""Where measurements and the user's own hardware are kept."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import DiskError


def cache_folder() -> Path:
    """Folder of dated measurements: ``$XDG_CACHE_HOME/ridgeline``, by default in ``~/.cache``."""
    return _base("XDG_CACHE_HOME", ".cache") / "ridgeline"


def config_folder() -> Path:
    """Folder of what the user wrote: ``$XDG_CONFIG_HOME/ridgeline``."""
    return _base("XDG_CONFIG_HOME", ".config") / "ridgeline"


def state_folder() -> Path:
    """Folder of what grows with use, as a chat's history does: ``$XDG_STATE_HOME/ridgeline``."""
    return _base("XDG_STATE_HOME", ".local/state") / "ridgeline"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole or not at all.

    Raises:
        DiskError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}.") from error


def _base(variable: str, default: str) -> Path:
    set_path = os.environ.get(variable, "")
    return Path(set_path) if Path(set_path).is_absolute() else Path.home() / default
