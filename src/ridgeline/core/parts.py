"""Parts that other packages bring, found by their entry points.

A package names a part in its ``pyproject.toml``, in a group for each kind::

    [project.entry-points."ridgeline.drafters"]
    my-drafter = "my_package:MyDrafter"

What a kind stands for is said by its registry (docs/extending.md). A part is imported when it is
asked for by name, and not before; Ridgeline's own names come first.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from ridgeline.core.errors import SettingsError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PartKind = Literal[
    "drafters", "executors", "model_families", "quantization_schemes", "queue_policies", "scorers"
]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)


def part_names(kind: PartKind) -> tuple[str, ...]:
    """The names of installed parts of a kind, in alphabetical order. Imports none of them."""
    return tuple(sorted({point.name for point in _found(kind)}))


def load_part(kind: PartKind, name: str) -> Any:
    """What the entry point of that name refers to, or ``None`` if there is none.

    Raises:
        SettingsError: two packages bring it, or it cannot be imported.
    """
    points = [point for point in _found(kind) if point.name == name]
    if not points:
        return None
    what = f"The part {name!r} of ridgeline.{kind}"
    if len({point.value for point in points}) > 1:
        packages = ", ".join(sorted(_package(point) for point in points))
        raise SettingsError(f"{what} is brought by several packages: {packages}; remove one.")
    try:
        return points[0].load()
    except Exception as error:  # whatever a foreign module raises while it is imported
        why = f"{type(error).__name__}: {error}"
        raise SettingsError(f"{what}, of {_package(points[0])}, cannot be loaded: {why}") from error


def one_of_or_part(names: tuple[str, ...], kind: PartKind) -> Callable[[str, str], str]:
    """Reads a setting whose values are some names, or those of parts."""

    def read(setting: str, value: str) -> str:
        if value in names:
            return value
        known = (*names, *part_names(kind))
        if value not in known:
            raise SettingsError(f"{setting} must be one of {', '.join(known)}.")
        return value

    return read


def list_parts() -> dict[str, str]:
    """Where each part comes from, by ``kind/name``."""
    return {
        f"{kind}/{point.name}": f"{point.value} of {_package(point)}"
        for kind in PART_KINDS
        for point in sorted(_found(kind))
    }


@cache
def _found(kind: PartKind) -> "tuple[EntryPoint, ...]":
    from importlib.metadata import entry_points  # which brings the parser of e-mail

    return tuple(entry_points(group=f"ridgeline.{kind}"))


def _package(point: "EntryPoint") -> str:
    return "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"
