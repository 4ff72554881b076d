"""What may be changed: the settings that declare what is worth trying (`Tries`)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.core.errors import SettingsError
from ridgeline.core.settings.reading import Effort, tries_of
from ridgeline.executors.traits import ExecutorTraits
from ridgeline.roofline.slo import Slo

FORMATS = ("quantization", "kv_cache_dtype")  # settings that change the numbers computed with


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting, the default's value and those to try, and what a change takes."""

    name: str
    default: object
    values: tuple[object, ...]
    effort: Effort
    predicted: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """The default but for some ``changes`` of settings, in the order of the axes."""

    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def formats(self) -> tuple[tuple[str, Any], ...]:
        """Changes that the quality of answers depends on."""
        return tuple(change for change in self.changes if change[0] in FORMATS)

    @property
    def label(self) -> str:
        """For people: ``quantization int8, max_num_seqs 128``."""
        return ", ".join(f"{name} {_text(value)}" for name, value in self.changes) or "default"

    @property
    def options(self) -> tuple[str, ...]:
        """As they are written on a command line."""
        return tuple(word for name, value in self.changes for word in _option(name, value))

    def config(self, base: EngineConfig) -> EngineConfig:
        """Raises `SettingsError` where the changes contradict each other."""
        return with_overrides(base, **dict(self.changes))

    def changed(self, name: str, value: object) -> "Candidate":
        """With one more change."""
        return Candidate((*self.changes, (name, value)))

    def without(self, name: str) -> "Candidate":
        """With one change less."""
        return Candidate(tuple(change for change in self.changes if change[0] != name))


DEFAULT = Candidate()


@dataclass(frozen=True, kw_only=True)
class Space:
    """``axes`` around ``base``, the settings that were asked for, or that hold without any."""

    base: EngineConfig
    axes: Sequence[Axis] = field(default=())

    def points(self) -> Iterator[Candidate]:
        """Every combination of what can be predicted, the default first, those of few changes
        before those of many; combinations that settings refuse are left out."""
        axes = [axis for axis in self.axes if axis.predicted]
        choices = [[(axis.name, value) for value in (axis.default, *axis.values)] for axis in axes]
        defaults = [(axis.name, axis.default) for axis in axes]
        found = [
            Candidate(
                tuple(new for new, old in zip(point, defaults, strict=True) if new[1] != old[1])
            )
            for point in product(*choices)
        ]
        found.sort(key=lambda candidate: len(candidate.changes))
        return (candidate for candidate in found if self.is_valid(candidate))

    def unpredicted(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with one more change of those that are measured alone."""
        for axis in self.axes:
            for value in () if axis.predicted else axis.values:
                changed = candidate.changed(axis.name, value)
                if self.is_valid(changed):
                    yield changed

    def is_valid(self, candidate: Candidate) -> bool:
        """Whether the settings go together."""
        try:
            candidate.config(self.base)
        except SettingsError:
            return False
        return True

    def effort(self, name: str) -> Effort:
        """What a change of a setting takes."""
        return next(axis.effort for axis in self.axes if axis.name == name)


def declared_space(
    base: EngineConfig,
    traits: ExecutorTraits,
    *,
    slo: Slo,
    given: Collection[str] = (),
    is_quantized: bool = False,
) -> Space:
    """The settings that declare values to try, but those that were ``given``, which stay.

    Values that the executor lacks are left out. A checkpoint that ``is_quantized`` keeps its
    format.
    """
    axes = []
    for name, tries in tries_of(EngineConfig).items():
        if name in given or (name == "quantization" and is_quantized):
            continue
        default = getattr(base, name)
        limit = None if tries.limit is None else getattr(slo, tries.limit)
        values = (*tries.values, *(() if limit is None else (limit,)))
        known = [
            value
            for value in values
            if value != default and _has(traits, name, value) and _has_draft(base, value)
        ]
        if known:
            axes.append(
                Axis(
                    name=name,
                    default=default,
                    values=tuple(known),
                    effort=tries.effort,
                    predicted=tries.predicted,
                )
            )
    order = {each.name: number for number, each in enumerate(fields(EngineConfig))}
    axes.sort(key=lambda axis: (axis.name not in FORMATS, order[axis.name]))
    return Space(base=base, axes=axes)


def _has(traits: ExecutorTraits, name: str, value: object) -> bool:
    known = {"quantization": traits.weight_formats, "kv_cache_dtype": traits.kv_formats}
    return name not in known or value in known[name]


def _has_draft(base: EngineConfig, value: object) -> bool:
    """The embedded model alone has a draft model of its own."""
    return value != "draft" or base.model is None or base.draft_model is not None


def _text(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _option(name: str, value: object) -> tuple[str, ...]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{option}" if value else f"--no-{option}",)
    return f"--{option}", str(value)
