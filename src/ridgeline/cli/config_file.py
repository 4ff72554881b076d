"""``--config FILE.yaml``: settings of a command in a file; the command line goes before it."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.core.errors import SettingsError
from ridgeline.core.spelling import suggestion

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 4 << 20
_QUOTED = re.compile(r" '(?!<)[^']{2,}'")  # of a file that has keys, but not the parser's own words


class Pairs(argparse.Action):
    """Collects repeated NAME=VALUE arguments into a dictionary."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, equals, value = str(values).partition("=")
        if not name or not equals or not value:
            parser.error(f"argument {option_string}: expected NAME=VALUE")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), name: value})


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


def secret_text(text: str) -> str:
    """The type of an option whose value no message shows."""
    return text


def shown_value(action: argparse.Action, value: object) -> str:
    """A value that was refused, as an error says it."""
    return "its value" if action.type is secret_text else repr(value)


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
        SettingsError: the file cannot be read, or has an unknown key or an impossible value.
    """
    if not hasattr(arguments, "config_file"):
        return
    parser, path = arguments.config_file
    put_settings(arguments, parser, read_yaml(path), where=f"{path}")


def put_settings(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    values: Mapping[str, Any],
    *,
    where: str,
) -> None:
    """Put settings by name where a command line gave none.

    Raises:
        SettingsError: one is not known, or its value is not possible.
    """
    settings = {action.dest: action for action in parser._actions if is_setting(action)}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in settings:
            raise SettingsError(f"{where}: there is no setting {key!r}{suggestion(name, settings)}")
        try:
            parsed = read_setting(settings[name], value)
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            shown = shown_value(settings[name], value)
            raise SettingsError(f"{where}: {key}: {shown} is not possible: {error}.") from error
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, parsed)


def is_setting(action: argparse.Action) -> bool:
    """The model, and options that leave nothing behind where they are not given."""
    is_suppressed = action.default is argparse.SUPPRESS
    return action.dest == "model" or (
        is_suppressed and action.dest not in ("help", "config_file") and bool(action.option_strings)
    )


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Names and values of a file.

    Raises:
        SettingsError: it cannot be read, is something else, or has a name twice.
    """
    import yaml  # not for every command line

    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    if len(text) > _MAX_BYTES:
        raise SettingsError(f"{path} has more than {_MAX_BYTES:,} bytes: it is no such file.")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        found = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}," if mark else ""
        problem = _QUOTED.sub("", str(error.problem))
        raise SettingsError(f"{path}{where} is not YAML: {problem}.") from error
    except yaml.YAMLError as error:
        problem = _QUOTED.sub("", " ".join(str(error).split()))
        raise SettingsError(f"{path} is not YAML: {problem}.") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is not YAML: it is nested too deep.") from error
    except (ValueError, LookupError, AttributeError) as error:  # which say the value
        raise SettingsError(f"{path} is not YAML: a value is none of its type's.") from error
    if root is None or found is None:
        return {}
    _check_keys(root, path)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SettingsError(
            f"{path} must hold lines of a name and its value, as max_model_len: 4096."
        )
    return found


def _check_keys(root: "yaml.Node", path: Path) -> None:
    """Refuse a key that is there twice, of which YAML would take the last."""
    import yaml

    values = [value for _, value in root.value] if isinstance(root, yaml.MappingNode) else []
    for mapping in (root, *values):
        if not isinstance(mapping, yaml.MappingNode):
            continue
        seen = set()
        for key, _ in mapping.value:
            name = str(key.value).replace("-", "_") if mapping is root else str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise SettingsError(f"{path}, line {line}: {key.value!r} is there twice.")
            seen.add(name)


def read_setting(action: argparse.Action, value: Any) -> Any:
    """A value as the option would have read it."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError("expected true or false")
        return value
    if isinstance(action, argparse._AppendAction):
        return [_scalar(action, each) for each in (value if isinstance(value, list) else [value])]
    if isinstance(action, Pairs) and isinstance(value, dict):
        return {str(name): str(each) for name, each in value.items()}
    if isinstance(value, dict) and action.type not in (None, secret_text):
        return _call(action, json.dumps(value))
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise argparse.ArgumentTypeError("expected one value")
    return _call(action, str(value))


def _call(action: argparse.Action, text: str) -> Any:
    assert action.type is None or callable(action.type)
    return text if action.type is None else action.type(text)
