"""``ridgeline bench links``: what exchanges between ranks take, by the ranks' own collectives."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import RidgelineError
from ridgeline.core.host import usable_cores
from ridgeline.core.parallel_layout import Link, ParallelLayout
from ridgeline.executors.distributed.links import link_of
from ridgeline.executors.distributed.messages import Begin, LinksMeasured, Report
from ridgeline.executors.distributed.ranks import Ranks

SIZES = tuple(1 << power for power in range(8, 21, 2))  # bytes: of a few values, and of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """All-gathers of ``num_ranks`` processes of this machine: seconds by the bytes of a part.

    Each rank sends its part to all others; ``link`` is the line through the first and the last.
    """

    num_ranks: int
    part_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def link(self) -> Link:
        return link_of(self.seconds, self.part_bytes, self.num_ranks)

    def rate(self, index: int) -> float:
        """Bytes that a rank sent in a second, with parts of one of the sizes."""
        return self.part_bytes[index] * (self.num_ranks - 1) / self.seconds[index]

    def to_json(self) -> dict[str, Any]:
        """One object of plain values."""
        return {
            "num_ranks": self.num_ranks,
            "latency_s": self.link.latency_s,
            "bytes_per_s": self.link.bytes_per_s,
            "exchanges": [
                {
                    "part_bytes": size,
                    "seconds": self.seconds[index],
                    "bytes_per_s": self.rate(index),
                }
                for index, size in enumerate(self.part_bytes)
            ],
        }


def measure_links(num_ranks: int, part_bytes: Sequence[int] = SIZES) -> LinkReport:
    """Start ranks that hold no model, and measure.

    Raises:
        EngineError: a rank was lost.
        MachineError: this machine lacks what they need.
    """
    measured: Future[list[float]] = Future()

    def on_report(rank: int, report: Report) -> None:
        if rank == 0 and isinstance(report, LinksMeasured):
            measured.set_result(report.seconds)

    def on_lost(error: RidgelineError) -> None:
        measured.set_exception(error)

    layout, threads = ParallelLayout(tensor=num_ranks), max(1, usable_cores() // num_ranks)
    begins = [
        Begin(layout=layout, rank=rank, num_threads=threads, sizes=tuple(part_bytes))
        for rank in range(num_ranks)
    ]
    ranks = Ranks(begins, on_report, on_lost)
    try:
        seconds = measured.result()
    finally:
        ranks.close()
    return LinkReport(num_ranks=num_ranks, part_bytes=tuple(part_bytes), seconds=tuple(seconds))
