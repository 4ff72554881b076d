"""Settings in environment variables: ``RIDGELINE_MAX_MODEL_LEN=4096`` is ``--max-model-len 4096``.

The command line goes before them, and they before ``--config``.
"""

import argparse
import os
import re
from collections.abc import Iterator

from ridgeline.cli.config_file import is_setting, read_setting, shown_value
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.spelling import suggestion

_PREFIX = "RIDGELINE_"
_OTHERS = {"RIDGELINE_CPU_LEVEL", "RIDGELINE_TEST_FOLDERS"}  # no settings of commands
# Kubernetes and Docker tell containers where a service is that is called "ridgeline".
_OF_PLATFORMS = re.compile(r"RIDGELINE_(\w+_)?(SERVICE_(HOST|PORT)\w*|PORT(_\d+_\w+)?|NAME)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def apply_environment(arguments: argparse.Namespace) -> None:
    """Put the environment's settings where the command line gave none.

    Those of other commands are left alone; one that is none of any is refused.

    Raises:
        SettingsError: a variable is no setting, or has an impossible value.
    """
    parser: argparse.ArgumentParser | None = getattr(arguments, "settings_parser", None)
    if parser is None:
        return
    settings = {action.dest: action for action in parser._actions if is_setting(action)}
    for variable, text in _variables():
        name = variable.removeprefix(_PREFIX).lower()
        if name not in settings:
            _check_known(variable)
        elif getattr(arguments, name, None) is None:
            try:
                is_flag = isinstance(settings[name], argparse.BooleanOptionalAction)
                value = _BOOLEANS.get(text.lower(), text) if is_flag else text
                setattr(arguments, name, read_setting(settings[name], value))
            except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
                shown = shown_value(settings[name], text)
                raise SettingsError(f"{variable}: {shown} is not possible: {error}.") from error


def _variables() -> Iterator[tuple[str, str]]:
    for variable, text in sorted(os.environ.items()):
        is_platform = _OF_PLATFORMS.fullmatch(variable) and (
            variable != "RIDGELINE_PORT" or _ADDRESS.match(text)
        )
        # Empty is not given: compose files and units pass variables on that are not set.
        if text and variable.startswith(_PREFIX) and variable not in _OTHERS and not is_platform:
            yield variable, text


def _check_known(variable: str) -> None:
    """Raise SettingsError for what is no setting of any command."""
    from ridgeline.server.config import ServerConfig  # only where there is something to look up

    known = {
        _PREFIX + field.upper()
        for config in (EngineConfig, SamplingParams, ServerConfig)
        for field in config.__dataclass_fields__
    }
    if variable not in known:
        raise SettingsError(f"{variable} is no setting{suggestion(variable, known)}")
