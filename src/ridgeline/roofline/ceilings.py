"""What a machine can do at best: bytes and FLOPs per second, as a value.

`Ceilings` come from a measurement (see `ridgeline.bench`) or from the catalogue; everything that
predicts takes them and does not know which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log

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
        """Dense peak of products in a format; of the next wider one where it has no rate."""
        own = form.name.partition("-")[0]  # groups of other sizes are multiplied alike
        for name in (own, *_WIDER.get(own, ())):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        return max(self.flops_per_s.values())

    def ridge(self, form: NumberFormat) -> float:
        """Intensity, in FLOPs per byte of main memory, at which both limits meet."""
        return self.peak_flops(form) / self.memory.bytes_per_s


# Formats whose rate holds for one that a machine has no rate for.
_WIDER = {
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float16", "float32"),
    "fp8": ("8bit", "bfloat16", "float32"),
    "int8": ("8bit", "bfloat16", "float32"),
    "int6": ("int8", "8bit", "bfloat16", "float32"),
    "int4": ("4bit", "int8", "8bit", "bfloat16", "float32"),
    "float64": ("float32",),
}
