"""Settings are frozen dataclasses whose annotations say what each field may be.

A bound is msgspec's (``Annotated[int, Meta(ge=1)]``), a choice is a ``Literal``, `Reads` and
`Needs` say the rest, and `Tries` what is worth trying. Options of the command line are generated
from the same fields.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from math import isfinite
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ridgeline.core.errors import SettingsError
from ridgeline.core.settings.bounds import Meta

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reads:
    """What a value of the right type is read as, by name and value; may raise SettingsError."""

    read: Callable[[str, Any], object]


@dataclass(frozen=True, slots=True)
class Needs:
    """What else must be set for a setting to have an effect, in words and asked of all settings."""

    setting: str
    is_met: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Secret:
    """A setting whose value no message shows."""


def is_secret(hint: Any) -> bool:
    """Whether an annotation has the note `Secret`."""
    return bool(_notes(hint, Secret))


Effort = Literal["restart", "repack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """Values of a setting that `ridgeline optimize` tries beside the default, and what a change
    takes: a restart, or weights that are packed anew as well.

    ``limit`` names a limit of latency (a field of `Slo`) whose seconds are tried, too. What is not
    ``predicted`` depends on more than lengths and arrivals, and is measured.
    """

    values: tuple[object, ...] = ()
    effort: Effort = "restart"
    limit: str | None = None
    predicted: bool = True


def tries_of(cls: type) -> dict[str, Tries]:
    """What is tried of each field that a class of settings declares so, in the fields' order."""
    hints = get_type_hints(cls, include_extras=True)
    found = ((field.name, _notes(hints[field.name], Tries)) for field in fields(cls))
    return {name: notes[0] for name, notes in found if notes}


def read_settings(settings: Any) -> None:
    """Check each field of a frozen dataclass, and put its value in the one form that code reads.

    Paths become text, and numbers may come as text. For ``__post_init__``.

    Raises:
        SettingsError: a value has the wrong type, is out of bounds or is not one of the choices, or
            it was given and another setting leaves it without effect.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        value = _read(field.name, getattr(settings, field.name), hints[field.name])
        object.__setattr__(settings, field.name, value)
    for field in fields(settings):
        if getattr(settings, field.name) != default_of(field):
            for need in _notes(hints[field.name], Needs):
                if not need.is_met(settings):
                    raise SettingsError(f"{field.name} has no effect without {need.setting}.")


def default_of(field: Field[Any]) -> object:
    """The value of a field that is not given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def changed_settings(settings: Any) -> dict[str, object]:
    """The values of a settings dataclass that are not the defaults, by name."""
    values = {field: getattr(settings, field.name) for field in fields(settings)}
    return {field.name: value for field, value in values.items() if value != default_of(field)}


def union_members(hint: Any) -> Sequence[Any]:
    """The types that a value may have, without None and without notes on them."""
    if get_origin(hint) is Annotated:
        return union_members(hint.__origin__)
    if get_origin(hint) not in (Union, UnionType):
        return () if hint is NoneType else (hint,)
    return [kind for member in get_args(hint) for kind in union_members(member)]


def _notes(hint: Any, kind: type[T]) -> Sequence[T]:
    """Notes of one kind on a hint and on the members of its union."""
    if get_origin(hint) is Annotated:
        own = [note for note in hint.__metadata__ if isinstance(note, kind)]
        return [*_notes(hint.__origin__, kind), *own]
    if get_origin(hint) in (Union, UnionType):
        return [note for member in get_args(hint) for note in _notes(member, kind)]
    return ()


def _read(name: str, value: Any, hint: Any) -> object:
    kind = union_members(hint)[0]
    if get_origin(kind) is Mapping:
        return _read_mapping(name, value, get_args(kind)[1])
    import msgspec  # which modules that only name settings do without

    if isinstance(value, PathLike):
        value = fspath(value)
    try:
        found = msgspec.convert(value, hint, strict=kind is not float)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name} must {_must(kind, value, hint)}.") from error
    if isinstance(found, float) and not isfinite(found):
        raise SettingsError(f"{name} must be a finite number.")
    for note in _notes(hint, Reads):
        found = note.read(name, found)
    return found


def _read_mapping(name: str, value: Any, item: Any) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        kind = {str: "texts", float: "numbers"}[union_members(item)[0]]
        raise SettingsError(f"{name} must map names to {kind}.")
    return {key: _read(f"{name} of {key!r}", each, item) for key, each in value.items()}


def _must(kind: Any, value: object, hint: Any) -> str:
    """What a value that was refused should have done."""
    if get_origin(kind) is Literal:
        return f"be one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return "be a list of texts"
    if kind is bool:
        return "be true or false"
    if kind is str:
        return "be text"
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        return "be a whole number"
    if not _is_number(value):
        return "be a number"
    meta = _notes(hint, Meta)[0]
    if kind is int and meta.ge is not None and meta.le is not None:
        return f"be between {meta.ge} and {meta.le}"
    bounds = (("greater than", meta.gt), ("at least", meta.ge), ("at most", meta.le))
    return "be " + " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
