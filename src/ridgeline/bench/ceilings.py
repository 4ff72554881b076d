"""The machine's ceilings: read bandwidth of each level of memory, and operations per format.

Within a round, a rate is that of the best of several loops in the best of several short intervals,
so that a neighbour who takes a core for a moment changes nothing; of several rounds it is the
median.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
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
_NEEDED = 2  # parts of a round that are measured however late it is

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
        self._measured: set[str] = set()  # parts of `sample_all`

    def sample(self) -> None:
        """One round of what bounds a step: memory and arithmetic, with all threads; about 3 s."""
        for level in self._levels:
            self._sample_read(level, self.threads)
        self._sample_operations()

    def sample_all(self, progress: Progress | None = None, *, until_s: float = inf) -> None:
        """One round of everything: each level, with all threads and with one; about 6 s.

        What bounds a step comes first. Once the monotonic clock is past ``until_s`` no more is
        begun, but for main memory and arithmetic, without which there is no roof.
        """
        parts = self._parts()
        for number, (name, measure) in enumerate(parts.items()):
            if number >= _NEEDED and time.monotonic() >= until_s:
                return
            if progress is not None:
                progress(number, len(parts), name)
            measure()
            self._measured.add(name)

    def _parts(self) -> dict[str, Callable[[], None]]:
        """What a round measures, by name."""
        reads = {
            f"{level.name} with {count} thread{'s' if count > 1 else ''}": partial(
                self._sample_read, level, count
            )
            for count in sorted({1, self.threads}, reverse=True)
            for level in reversed(self._levels)
        }
        memory, *others = reads.items()
        return dict([memory, ("arithmetic", self._sample_operations), *others])

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

    @property
    def left_out(self) -> tuple[str, ...]:
        """What `sample_all` had no time for in any round."""
        return tuple(name for name in self._parts() if name not in self._measured)

    def report(self) -> "CeilingReport":
        """The medians of all rounds so far."""
        return CeilingReport(
            levels=self._levels,
            threads=self.threads,
            reads={
                (level.name, count): _median(self._reads[level.name, count])
                for level in self._levels
                for count in sorted({1, self.threads})
                if (level.name, count) in self._reads
            },
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
    left_out: tuple[str, ...] = ()

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
        return {
            "read": reads,
            "arithmetic": operations,
            "conditions": dict(self.conditions),
            "left_out": list(self.left_out),
        }


def measure_ceilings(
    loops: NativeLoops,
    *,
    threads: int | None = None,
    rounds: int = 3,
    progress: Progress | None = None,
    until_s: float = inf,
) -> CeilingReport:
    """Everything, over some rounds; about 20 s, or until the monotonic clock is past ``until_s``:
    then the report says what was left out."""
    meter = CeilingMeter(loops, threads=threads)
    for number in range(rounds):
        if number and time.monotonic() >= until_s:
            break
        meter.sample_all(progress, until_s=until_s)
    return replace(meter.report(), left_out=meter.left_out)


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
