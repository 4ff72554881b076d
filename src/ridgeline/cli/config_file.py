"""``--config FILE.yaml``: settings of a command in a file; the command line goes before it."""

import argparse
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ridgeline.core.errors import InvalidRequestError


class ConfigFile(argparse.Action):
    """Notes the file and whose settings it has; `apply_config_file` reads it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (parser, values))


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """``--config``, for commands whose settings are those of configuration dataclasses."""
    parser.add_argument(
        "--config",
        dest="config_file",
        action=ConfigFile,
        type=Path,
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="settings by name; those of the command line go before",
    )


def apply_config_file(arguments: argparse.Namespace) -> None:
    """Put the file's settings where the command line gave none.

    Raises:
        InvalidRequestError: the file cannot be read, or has an unknown key or an impossible value.
    """
    if not hasattr(arguments, "config_file"):
        return
    parser, path = arguments.config_file
    settings = {action.dest: action for action in parser._actions if _is_setting(action)}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in settings:
            raise InvalidRequestError(f"{path}: {_unknown(key, list(settings))}")
        try:
            parsed = _parsed(settings[name], value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise InvalidRequestError(f"{path}: {key}: {value!r} is not possible.") from error
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, parsed)


def _is_setting(action: argparse.Action) -> bool:
    """The model, and options that leave nothing behind where they are not given."""
    is_suppressed = action.default is argparse.SUPPRESS
    return action.dest == "model" or (
        is_suppressed and action.dest not in ("help", "config_file") and bool(action.option_strings)
    )


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which others take the last."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """What each mapping begins with: before keys of others are merged into it."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{key.value!r} is there more than once"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        super().flatten_mapping(node)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = _Loader(path.read_bytes()).get_single_data()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidRequestError(f"{path}{where}: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequestError(f"{path} is not YAML.") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InvalidRequestError(f"{path} is not a list of names and values.")
    return found


def _unknown(key: str, known: Sequence[str]) -> str:
    near = get_close_matches(key.replace("-", "_"), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"there is no setting {key!r}{hint}"


def _parsed(action: argparse.Action, value: Any) -> Any:
    """A value as the option would have read it."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise TypeError("not true or false")
        return value
    if isinstance(action, argparse._AppendAction):
        return [_scalar(action, each) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, dict):
        if action.type is None:  # NAME=VALUE pairs
            return {str(name): str(each) for name, each in value.items()}
        return _call(action, json.dumps(value))
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError("not a value")
    return _call(action, str(value))


def _call(action: argparse.Action, text: str) -> Any:
    assert action.type is None or callable(action.type)
    return text if action.type is None else action.type(text)
