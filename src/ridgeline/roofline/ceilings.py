"""What a machine can do at best: bytes and FLOPs per second, as a value.

`Ceilings` come from a measurement (see `ridgeline.bench`) or from the catalogue; everything that
predicts takes them and does not know which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """A level of memory: what fits, and how fast all cores together read it."""

    name: str
    size_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The roof of one machine, or of one device of it.

    Attributes:
        name: of the machine.
        levels: memory from the nearest (smallest) to the main memory.
        flops_per_s: dense peak by number format; integer rates are operations.
        kernel_bytes_per_s: what a matrix-vector product of a weight format sustains from main
            memory, where unpacking keeps it below the memory's own rate.
        link_bytes_per_s: what one rank sends to the others of its group, 0 if it is alone.
        link_latency_s: of one collective call.
        measured: false for figures of a datasheet.
        conditions: when and how it was measured: date, governor, threads, load, …
    """

    name: str
    levels: tuple[MemoryLevel, ...]
    flops_per_s: Mapping[str, float]
    kernel_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    measured: bool = False
    conditions: Mapping[str, str | float | int | bool | None] = field(default_factory=dict)

    @property
    def memory(self) -> MemoryLevel:
        """The main memory."""
        return self.levels[-1]

    def bytes_per_s(self, working_set_bytes: float) -> float:
        """Read bandwidth for data that is used over and over.

        A set that a level holds with room to spare is read at its rate; between 0.7 and 1.4 times
        its size the rate goes over to the next level's, in the logarithm of both.
        """
        for level, beyond in zip(self.levels, self.levels[1:], strict=False):
            low, high = 0.7 * level.size_bytes, 1.4 * level.size_bytes
            if working_set_bytes <= low:
                return level.bytes_per_s
            if working_set_bytes < high:
                part = log(working_set_bytes / low) / log(high / low)
                rate: float = level.bytes_per_s ** (1 - part) * beyond.bytes_per_s**part
                return rate
        return self.memory.bytes_per_s

    def peak_flops(self, form: NumberFormat) -> float:
        """Dense peak of products in a format; of the next wider one where it has no rate.

        Ask for that of the activations where weights are unpacked to these (`has_own_rate`).
        float16 takes bfloat16's, since tensor cores that have this have both; bfloat16 without a
        rate of its own takes float32's.

        Raises:
            InvalidRequestError: no format of that width or more has a rate.
        """
        for name in _as_wide(form):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        if form.bits == 64 and "float32" in self.flops_per_s:
            return self.flops_per_s["float32"] / 2  # vectors hold half as many
        raise InvalidRequestError(f"{self.name} has no rate for {form.name}; choose another dtype.")

    def has_rate(self, form: NumberFormat) -> bool:
        """Whether `peak_flops` knows one."""
        if form.bits == 64 and "float32" in self.flops_per_s:
            return True
        return any(name in self.flops_per_s for name in _as_wide(form))

    def has_own_rate(self, form: NumberFormat) -> bool:
        """Whether products of two numbers of that format have one, not just those of a wider one
        to which they are unpacked."""
        return any(name in self.flops_per_s for name in _names(form))

    def ridge(self, form: NumberFormat) -> float:
        """Intensity, in FLOPs per byte of main memory, at which both limits meet."""
        return self.peak_flops(form) / self.memory.bytes_per_s


def _as_wide(form: NumberFormat) -> list[str]:
    """A format and those whose rate holds for it as well: as wide or wider, the narrowest first."""
    names = _names(form)
    if form.bits <= 16 and form.name != "bfloat16":  # whose range float16 has not
        names += ["bfloat16", "float16"]
    return [*names, "float32"] if form.bits <= 32 else names


def _names(form: NumberFormat) -> list[str]:
    """What the rate of a format itself may be called."""
    names = [form.name.partition("-")[0]]  # groups of other sizes are multiplied alike
    if form.name.startswith(("fp8", "float8")):
        names += ["fp8", "8bit"]
    elif form.is_quantized:
        names += ["int4", "4bit"] if form.bits <= 4 else []
        names += ["int8", "8bit"]
    return names
