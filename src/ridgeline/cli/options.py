"""Options generated from the configuration dataclasses, so that neither drifts from the other."""

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from ridgeline.cli.config_file import Pairs, add_config_option, secret_text
from ridgeline.cli.other_programs import COMMANDS, meant_option
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.kv_compression import KVCompression
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.settings.reading import is_secret, union_members
from ridgeline.core.spelling import nearest
from ridgeline.core.structured_outputs import StructuredOutputs

# Shown by --help; the others by --help-all.
COMMON_OPTIONS = {
    "dtype", "quantization", "executor", "max_model_len", "tensor_parallel_size",
    "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n",
    "host", "port", "api_key", "served_model_name",
}  # fmt: skip
_NOT_OPTIONS = {"model"}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SHORTEST_S = 10.0  # of a budget
_SHORT = {  # as in llama.cpp, vLLM
    "max_tokens": ("-n",), "tensor_parallel_size": ("-tp",), "pipeline_parallel_size": ("-pp",),
    "expert_parallel_size": ("-ep",), "context_parallel_size": ("-cp",),
}  # fmt: skip
_CLAUSE_END = re.compile(r"[.;] ")  # --help has the first clause, --help-all all of them
_NUMBER = re.compile(r"-\.?\d")  # a value, and no option
_SETTING = re.compile(r"""^[a-z]+(?=[ =])|(?<![\w/.'"-])[a-z]+(?:_[a-z]+)+(?![\w/'":-]|\.\w)""")
_MARKED = re.compile(r"`([a-z]+)`")
_VALUE = re.compile(r"(?<![\w/-])(--?[a-z-]+)='(\w+)'")
_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,9})?) ?(?:B|([KMGT])(B|iB|))?", re.IGNORECASE | re.ASCII)


class Parser(argparse.ArgumentParser):
    """Exit code 2 and one line for a wrong command line; ``--help-all`` beside ``--help``.

    ``module`` has the options of a command, and is imported when the command is chosen.
    """

    def __init__(self, *, module: str | None = None, **kwargs: Any) -> None:
        super().__init__(formatter_class=_WithDefaults, **kwargs, allow_abbrev=False)
        self.hidden: list[tuple[argparse.Action, str]] = []
        self._module = module

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is not known here, where the options of the command are."""
        self.load_options()
        words = sys.argv[1:] if args is None else args
        for word in self._own_options(words):
            self._check_option(word)
        found, unknown = super().parse_known_args(args, namespace)
        several = [each for each in self._get_positional_actions() if each.nargs == "*"]
        has_end = "--" in unknown[:1]
        if several and (has_end or not any(word.startswith("-") for word in unknown)):
            # argparse takes none of those that follow an option.
            more = [self._get_value(several[0], word) for word in unknown[has_end:]]
            setattr(found, several[0].dest, [*getattr(found, several[0].dest), *more])
        elif unknown:
            self._refuse(unknown[0])
        return found, []

    def load_options(self) -> None:
        """Import the module that has the options, if there is one still to import."""
        if self._module is not None:
            module, _, function = self._module.partition(":")
            getattr(importlib.import_module(module), function or "add_options")(self)
            self._module = None

    def _own_options(self, words: Sequence[str]) -> Iterator[str]:
        """Words that can only be options, before those of a command."""
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            if word.startswith("-") and " " not in word and not _NUMBER.match(word):
                yield word.partition("=")[0]

    def _check_option(self, option: str) -> None:
        """Refuse one that is not known, before its value is taken for a model, or it for the
        beginning of another: ``-ngl 99`` is not ``-n gl``."""
        known = self._option_string_actions
        is_joined = not option.startswith("--") and option[:2] in known
        meant = meant_option(option, frozenset(known))
        if option not in known and option != "-" and (meant is not None or not is_joined):
            self._refuse(option)

    def _refuse(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        if not option.startswith("-"):
            text = "; a prompt is given as -p TEXT" if " " in word else ""
            self.error(f"unexpected argument {word[:80]}{text}")
        meant = meant_option(option, frozenset(self._option_string_actions))
        if meant is not None:
            self.error(f"there is no option {option}: {meant}")
        names = [name.removeprefix("--") for name in self._option_string_actions]
        is_long = option.startswith("--")
        near = nearest(option.removeprefix("--"), names, alike=0.7) if is_long else None
        hint = "" if near is None else f"; did you mean --{near}?"
        self.error(f"there is no option {option}{hint}")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Only whole options: argparse takes -p for the beginning of -pp, even so."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if option_string.startswith(each[1])]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of the choices, with the nearest."""
        if action.choices is None or value in action.choices:
            return
        is_command = action.dest == argparse.SUPPRESS
        if is_command and value in COMMANDS:
            self.error(f"there is no command {value}: {COMMANDS[value]}")
        near = nearest(str(value), map(str, action.choices))
        hint = "" if near is None else f"; did you mean {near}?"
        if is_command:
            self.error(f"there is no command {value}{hint}")
        choices = ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"{value!r} is none of {choices}{hint}")

    def in_options(self, message: str, words: Sequence[str]) -> str:
        """An error that names settings, with the options of the command that ``words`` begin.

        A setting is what has an underscore, begins a message, or stands between backquotes, as a
        word that may also mean itself must; an option is spelled as typed.
        """
        commands = None if self._subparsers is None else self._subparsers._group_actions[0].choices
        if isinstance(commands, dict) and words[:1] and words[0] in commands:
            return str(commands[words[0]].in_options(message, words[1:]))
        typed = {word.partition("=")[0] for word in words}
        options: dict[str, str] = {}
        for option, action in self._option_string_actions.items():
            if option in typed or (option.startswith("--") and action.dest not in options):
                options[action.dest] = option
        named = _SETTING.sub(lambda found: options.get(found[0], found[0]), message)
        named = _MARKED.sub(lambda found: options.get(found[1], found[1]), named)
        return _VALUE.sub(r"\1 \2", named)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


class _WithDefaults(argparse.RawDescriptionHelpFormatter):  # raw: an example is a line
    """Names the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        is_flag = isinstance(action.default, bool)
        return _with_default(action.help or "", None if is_flag else action.default)


def _with_default(text: str, value: object) -> str:
    """A line of --help with a default that it does not name."""
    if value in (None, argparse.SUPPRESS, [], ()) or "default" in text:
        return text
    values = value if isinstance(value, list | tuple) else (value,)
    shown = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    return f"{text}; default: {shown}".removeprefix("; ")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        assert isinstance(parser, Parser)
        for action, text in parser.hidden:
            action.help = text
        parser.print_help()
        sys.exit(0)


def add_model_options(parser: Parser) -> None:
    """MODEL and every field of `EngineConfig`."""
    # The first before the options, which have no defaults of their own.
    parser.set_defaults(model=None, settings_parser=parser)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="folder, GGUF file or hub name, also as -m MODEL; default: the embedded model",
    )
    parser.add_argument(
        "-m", "--model", dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=_threads,
        metavar="N",
        default=argparse.SUPPRESS,
        help="processors to use; default: all that this process may",
    )
    for component in (EngineConfig, *EngineConfig.__bases__):
        title = component.__name__.removesuffix("Settings").removesuffix("Config").lower()
        add_settings(parser, component, title=title)
    add_config_option(parser)
    parser.add_argument("--help-all", nargs=0, action=_HelpAll, help="show every option and exit")


def add_sampling_options(parser: Parser) -> None:
    """Every field of `SamplingParams`."""
    title = "sampling, where the model's generation_config.json says nothing else"
    add_settings(parser, SamplingParams, title=title)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given on the command line."""
    return given_settings(arguments, EngineConfig)


def sampling_params(arguments: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Sampling settings of the command line over ``defaults``; −1 tokens at the most are no limit.

    Raises:
        InvalidRequestError: a value is out of bounds.
    """
    given = given_settings(arguments, SamplingParams)
    if given.get("max_tokens") == -1:  # as in llama.cpp, and in requests to a server
        del given["max_tokens"]
    return SamplingParams(**{**defaults, **given})


def given_settings(arguments: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The settings of a configuration dataclass that were given on the command line."""
    names = (name for name in cls.__dataclass_fields__ if name not in _NOT_OPTIONS)
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def add_settings(parser: Parser, cls: type[Any], *, title: str, shown: bool = False) -> None:
    """Every field that a configuration dataclass adds to its bases; its docstring says which.

    ``shown`` shows all of them in --help, and not only the common ones.
    """
    group = parser.add_argument_group(title)
    hints, texts = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    for field in dataclasses.fields(cls):
        is_own = field.name in cls.__annotations__
        if not is_own or field.name in _NOT_OPTIONS or field.name in _taken(parser):
            continue
        options = _argument_options(field.name, hints[field.name])
        if is_secret(hints[field.name]):
            options["type"] = secret_text
        text = texts[field.name].replace("%", "%%")
        first = argparse.SUPPRESS
        if field.name in COMMON_OPTIONS:
            first = _with_default(_CLAUSE_END.split(text)[0], _default(field))
        text = _with_default(text, _default(field))
        action = group.add_argument(
            *_SHORT.get(field.name, ()),
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text if shown else first,
            **options,
        )
        if not shown:
            parser.hidden.append((action, text))


def _default(field: "dataclasses.Field[Any]") -> object:
    """As it would be typed."""
    value: object = None if field.default is dataclasses.MISSING else field.default
    if isinstance(value, bool):
        return "on" if value else None
    if field.name.endswith("_bytes") and isinstance(value, int) and value:
        return f"{value / (1 << 30):g}GiB"
    return value


def _taken(parser: Parser) -> set[str]:
    return {action.dest for action in parser._actions}


def _argument_options(name: str, hint: Any) -> dict[str, Any]:
    kind, *others = union_members(hint)
    origin = typing.get_origin(kind)
    words = [word for other in others for word in typing.get_args(other)]
    if kind is int and words:
        return {"type": lambda text: text if text in words else _whole_number(text), "metavar": "N"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is tuple:
        (item, *_) = union_members(typing.get_args(kind)[0])
        return {"action": "append", "type": _READERS[item], "metavar": item.__name__.upper()}
    if name.endswith("_bytes"):
        return {"type": num_bytes, "metavar": "SIZE"}
    if kind in _READERS:
        return {"type": _READERS[kind], "metavar": {int: "N", float: "X", str: "S"}[kind]}
    if kind in (StructuredOutputs, KVCompression):
        return {"type": _json_object, "metavar": "JSON"}
    if origin is typing.Literal:
        return {"type": str, "metavar": "S"}
    if typing.get_args(kind)[0] is str:
        return {"action": Pairs, "metavar": "NAME=VALUE"}
    return {"type": _json_mapping, "metavar": "JSON"}


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("expected a whole number") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("expected a number") from error


_READERS: dict[type, Callable[[str], object]] = {int: _whole_number, float: _number, str: str}


def _threads(text: str) -> int:
    """How many processors this process, and those that it starts, may run on from now on."""
    count = _whole_number(text)
    if not hasattr(os, "sched_setaffinity"):
        raise argparse.ArgumentTypeError("this system cannot bind a process to processors")
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(usable):
        raise argparse.ArgumentTypeError(f"expected 1 to {len(usable)}, the processors there are")
    os.sched_setaffinity(0, usable[:count])
    return count


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError("expected JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value


def _json_mapping(text: str) -> dict[int, float]:
    try:
        return {int(key): float(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError('expected {"token id": number, …}') from error


def field_docs(cls: type) -> dict[str, str]:
    """Texts of the ``Attributes:`` section of a dataclass's docstring, by field name."""
    section = inspect.getdoc(cls) or ""
    section = section.partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "").rstrip(".") for name, text in entries}


def num_bytes(text: str) -> int:
    """Bytes, for argparse: 2GB is 2·10⁹, 2GiB and 2G are 2·2³⁰."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError("expected bytes, such as 2000000000, 2GB or 2GiB")
    number, unit, ending = match.groups()
    base = 1000 if (ending or "").upper() == "B" else 1024
    return int(Decimal(number) * base ** (_UNITS.index(unit.upper()) if unit else 0))


def token_ids(text: str) -> list[int]:
    """Comma-separated token ids, for argparse."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError("expected whole numbers: 1,2,3") from error


def numbers(
    least: int = 1, most: int = 1_000_000, *, may_be_empty: bool = False
) -> Callable[[str], list[int]]:
    """What reads comma-separated whole numbers within bounds, for argparse."""

    def parse(text: str) -> list[int]:
        if may_be_empty and not text:
            return []
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError("expected whole numbers: 1,8,32") from error
        if not all(least <= value <= most for value in values):
            raise argparse.ArgumentTypeError(f"expected numbers from {least} to {most}")
        return values

    return parse


def positive(text: str) -> float:
    """A finite number above 0, for argparse."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("expected a positive number")
    return value


def duration(text: str) -> float:
    """Seconds of ``90s``, ``15m`` or ``1h``, for argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not _SHORTEST_S <= seconds <= 24 * _SECONDS["h"]:
        raise argparse.ArgumentTypeError("expected a time from 10s to 24h, such as 90s or 15m")
    return seconds


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt from ``--prompt``, ``--prompt-file`` or standard input.

    Raises:
        InvalidRequestError: the file cannot be read, or is not UTF-8.
    """
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.prompt_file is not None:
        return _utf8(arguments.prompt_file.read_bytes, str(arguments.prompt_file))
    if (text := piped_text()) is None:
        raise InvalidRequestError("Give a prompt: --prompt, --prompt-file, or standard input.")
    return text


def piped_text() -> str | None:
    """Standard input; ``None`` if it is closed, or nothing is piped into it.

    Raises:
        InvalidRequestError: it cannot be read, or is not UTF-8.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return _utf8(sys.stdin.buffer.read, "Standard input")


def _utf8(read: Callable[[], bytes], name: str) -> str:
    try:
        return read().decode()
    except OSError as error:
        raise InvalidRequestError(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8 text.") from error
