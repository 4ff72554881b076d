"""Names that a user gave to models: ``aliases.yaml`` in the folder of their configuration."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.core.errors import CorruptFileError, DiskError, InvalidRequestError
from ridgeline.roofline.storage import config_folder

_ALIAS = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


def read_aliases() -> dict[str, str]:
    """Models by alias, empty without a file.

    Raises:
        CorruptFileError: the file is not a list of names and models.
    """
    path = _path()
    if not path.is_file():
        return {}
    import yaml  # 30 ms that those who have no aliases do without

    try:
        found: Any = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise CorruptFileError(f"{path} cannot be read as YAML.") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(model, str) for name, model in found.items()
    ):
        raise CorruptFileError(f"{path} must have lines such as `qwen: Qwen/Qwen3-0.6B`.")
    return found


def check_alias(alias: str) -> None:
    """
    Raises:
        InvalidRequestError: it is no name.
        CorruptFileError: as `read_aliases`.
    """
    if not _ALIAS.fullmatch(alias):
        raise InvalidRequestError(f"{alias!r} is no alias: letters, digits, dots, dashes.")
    read_aliases()


def write_alias(alias: str, model: str) -> None:
    """Give a model a name; one that was given before goes to it.

    Raises:
        InvalidRequestError: it is no name.
        DiskError: the file cannot be written.
    """
    check_alias(alias)
    _write(read_aliases() | {alias: model})


def forget_aliases(is_gone: Callable[[str], bool]) -> list[str]:
    """Take back the names of models that are gone; which these were.

    Raises:
        DiskError: the file cannot be written.
    """
    aliases = read_aliases()
    gone = [alias for alias, model in aliases.items() if is_gone(model)]
    if gone:
        _write({alias: model for alias, model in aliases.items() if alias not in gone})
    return gone


def _write(aliases: dict[str, str]) -> None:
    import yaml

    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        draft.write_text(yaml.safe_dump(aliases), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}.") from error


def _path() -> Path:
    return config_folder() / "aliases.yaml"
