"""The machine's ceilings: read bandwidth of each level of memory, and operations per format.

Within a round, a rate is that of the best of several loops in the best of several short intervals,
so that a neighbour who takes a core for a moment changes nothing; of several rounds it is the
median.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import psutil

from ridgeline.bench.caches import CacheSizes, cache_sizes
from ridgeline.bench.conditions import Conditions, Watch
from ridgeline.bench.native_loops import NativeLoops
from ridgeline.core.host import available_memory_bytes, cpu_name, usable_cores
from ridgeline.kernels.cpu.library import native_level
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel

# The last-level cache may be shared with neighbours whose size the system does not tell.
_DRAM_TIMES_L3 = 4
_MIN_DRAM_BYTES = 256 << 20
_MAX_MEMORY_SHARE = 0.25
_SAMPLE_S = 0.05

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of memory and the working set, of each thread, that lies in it."""

    name: str
    size_bytes: int
    working_set_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The rate of the best loop, and its name."""

    rate: float
    loop: str


def levels(threads: int, sizes: CacheSizes | None = None) -> tuple[Level, ...]:
    """The levels of memory as ``threads`` threads, each on a core of its own, see them.

    ``size_bytes`` are those of all the threads' caches together; working sets take half of a cache.
    """
    sizes = sizes or cache_sizes()
    l3_bytes = sizes.l3_bytes * ceil(threads / sizes.l3_cores)
    room = available_memory_bytes() * _MAX_MEMORY_SHARE
    dram = min(room, max(_MIN_DRAM_BYTES, _DRAM_TIMES_L3 * l3_bytes))
    return (
        Level(
            name="L1", size_bytes=sizes.l1_bytes * threads, working_set_bytes=sizes.l1_bytes // 2
        ),
        Level(
            name="L2", size_bytes=sizes.l2_bytes * threads, working_set_bytes=sizes.l2_bytes // 2
        ),
        Level(name="L3", size_bytes=l3_bytes, working_set_bytes=l3_bytes // 2 // threads),
        Level(
            name="DRAM",
            size_bytes=psutil.virtual_memory().total,
            working_set_bytes=int(dram) // threads,
        ),
    )


class CeilingMeter:
    """Collects rounds of measurements; a benchmark takes one before each of its own rounds."""

    def __init__(self, loops: NativeLoops, *, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()
        self._loops = loops
        self._levels = levels(self.threads)
        self._watch = Watch()
        self._reads: dict[tuple[str, int], list[Best]] = {}
        self._operations: dict[str, list[Best]] = {}

    def sample(self) -> None:
        """One round of what bounds a step: memory and arithmetic, with all threads; about 3 s."""
        for level in self._levels:
            self._sample_read(level, self.threads)
        self._sample_operations()

    def sample_all(self, progress: Progress | None = None) -> None:
        """One round of everything: each level, with one thread and with all; about 6 s."""
        counts = sorted({1, self.threads})
        total = len(self._levels) * len(counts)
        for index, level in enumerate(self._levels):
            for number, count in enumerate(counts):
                if progress is not None:
                    progress(index * len(counts) + number, total, f"reading {level.name}")
                self._sample_read(level, count)
        self._sample_operations()

    def _sample_read(self, level: Level, threads: int) -> None:
        patterns = range(len(self._loops.read_patterns))
        near = level.working_set_bytes * threads <= self._levels[1].size_bytes
        rates = {
            self._loops.read_patterns[pattern]: self._loops.read_bytes_per_s(
                pattern,
                bytes_per_thread=level.working_set_bytes,
                threads=threads,
                seconds=_SAMPLE_S,
            )
            for pattern in patterns
            if not near or "prefetch" not in self._loops.read_patterns[pattern]
        }
        self._reads.setdefault((level.name, threads), []).append(_best(rates))

    def _sample_operations(self) -> None:
        for number_format, best in operation_rates(self._loops, self.threads).items():
            self._operations.setdefault(number_format, []).append(best)

    def report(self) -> "CeilingReport":
        """The medians of all rounds so far."""
        return CeilingReport(
            levels=self._levels,
            threads=self.threads,
            reads={key: _median(rounds) for key, rounds in self._reads.items()},
            operations={name: _median(rounds) for name, rounds in self._operations.items()},
            conditions={
                **self._watch.conditions(threads=self.threads),
                "kernels": native_level(),
            },
        )


@dataclass(frozen=True, kw_only=True)
class CeilingReport:
    """What was measured: ``reads`` in bytes per second by (level, threads), ``operations`` per
    second by number format."""

    levels: tuple[Level, ...]
    threads: int
    reads: Mapping[tuple[str, int], Best]
    operations: Mapping[str, Best]
    conditions: Conditions = field(default_factory=dict)

    @property
    def contended(self) -> bool:
        """Whether other processes took processors meanwhile."""
        return bool(self.conditions["contended"])

    @property
    def memory_bytes_per_s(self) -> float:
        """Main memory, all threads."""
        return self.reads[self.levels[-1].name, self.threads].rate

    def ceilings(self) -> Ceilings:
        """As the roofline takes them; levels that were not measured are left out."""
        return Ceilings(
            name=cpu_name(),
            levels=tuple(
                MemoryLevel(
                    name=level.name,
                    size_bytes=level.size_bytes,
                    bytes_per_s=self.reads[level.name, self.threads].rate,
                )
                for level in self.levels
                if (level.name, self.threads) in self.reads
            ),
            flops_per_s={name: best.rate for name, best in self.operations.items()},
            measured=True,
            conditions=self.conditions,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values: rates by level and number of threads, with the loop that reached them."""
        reads: dict[str, dict[str, Any]] = {}
        for (level, threads), best in self.reads.items():
            entry = {"bytes_per_s": best.rate, "loop": best.loop}
            reads.setdefault(level, {})[str(threads)] = entry
        operations = {
            name: {"operations_per_s": best.rate, "loop": best.loop}
            for name, best in self.operations.items()
        }
        return {"read": reads, "arithmetic": operations, "conditions": dict(self.conditions)}


def measure_ceilings(
    loops: NativeLoops,
    *,
    threads: int | None = None,
    rounds: int = 3,
    progress: Progress | None = None,
) -> CeilingReport:
    """Everything, over some rounds; about 20 s."""
    meter = CeilingMeter(loops, threads=threads)
    for _ in range(rounds):
        meter.sample_all(progress)
    return meter.report()


def operation_rates(loops: NativeLoops, threads: int) -> dict[str, Best]:
    """One round of the operations per second in each number format."""
    rates: dict[str, dict[str, float]] = {}
    for loop in loops.arithmetic:
        rate = loops.operations_per_s(loop, threads=threads, seconds=_SAMPLE_S)
        rates.setdefault(loop.number_format, {})[loop.name] = rate
    # A product of narrow numbers may always be taken as one of wider ones.
    rates["bfloat16"] = {**rates["float32"], **rates.get("bfloat16", {})}
    rates["int4"] = {**rates["int8"], **rates.get("int4", {})}
    return {number_format: _best(by_loop) for number_format, by_loop in rates.items()}


def _best(rates: Mapping[str, float]) -> Best:
    loop = max(rates, key=rates.__getitem__)
    return Best(rate=rates[loop], loop=loop)


def _median(rounds: list[Best]) -> Best:
    rate = statistics.median(best.rate for best in rounds)
    nearest = min(rounds, key=lambda best: abs(best.rate - rate))
    return Best(rate=rate, loop=nearest.loop)
