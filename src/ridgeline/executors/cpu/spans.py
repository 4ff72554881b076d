"""What the native threads recorded, as spans of the model's ops."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ridgeline.core.ops import Op
from ridgeline.core.recorded_step import OpSpan, Share, TileJob
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlPart, RlSpanKind

_PART_NAMES = {RlPart.ROPE_TABLES: "RopeTables", RlPart.SAMPLE: "Sample"}


@dataclass(kw_only=True)
class SpanLog:
    """What one pass recorded: native spans, and ops that ran in Python between them."""

    pool: Pool
    taken: list[npt.NDArray[np.void]] = field(default_factory=list)
    caller_ops: list[tuple[Op, float, float]] = field(default_factory=list)

    def take(self) -> None:
        """Take what the pool has recorded; its lock is held."""
        self.taken.append(self.pool.take_spans())

    def timed(self, run: Callable[[Op], None]) -> Callable[[Op], None]:
        """The same, noting when each op ran."""

        def run_timed(op: Op) -> None:
            begin_s = time.perf_counter()
            run(op)
            self.caller_ops.append((op, begin_s, time.perf_counter()))

        return run_timed

    def passes(
        self, model_ops: Sequence[Op], native: Sequence[int]
    ) -> tuple[tuple[OpSpan, ...], ...]:
        """The spans of each forward pass; ``native[i]`` is the place of native op i in the model.

        A replay's passes each begin with the rotary tables. With `caller_ops` there is one.
        """
        spans = list(_native_spans(self.taken, model_ops, native, self.pool.num_threads))
        places = {id(op): place for place, op in enumerate(model_ops)}
        for op, begin_s, end_s in self.caller_ops:
            name, ops = type(op).__name__, (places[id(op)],)
            spans.append(OpSpan(name=name, ops=ops, begin_s=begin_s, end_s=end_s))
        spans.sort(key=lambda span: span.begin_s)
        starts = [
            at for at, span in enumerate(spans) if span.name == _PART_NAMES[RlPart.ROPE_TABLES]
        ]
        if self.caller_ops or len(starts) < 2:
            return (tuple(spans),)
        stops = [*starts[1:], len(spans)]
        return tuple(tuple(spans[i:j]) for i, j in zip([0, *starts[1:]], stops, strict=True))


def _native_spans(
    taken: Sequence[npt.NDArray[np.void]],
    model_ops: Sequence[Op],
    native: Sequence[int],
    num_threads: int,
) -> list[OpSpan]:
    """An op's jobs come before it, a job's shares after it."""
    found: list[OpSpan] = []
    jobs: list[TileJob] = []
    for kind, number, thread, tiles, begin, end, busy in np.concatenate(taken).tolist():
        begin_s, end_s = begin / 1e9, end / 1e9
        match RlSpanKind(kind):
            case RlSpanKind.JOB:
                jobs.append(TileJob(num_tiles=tiles, begin_s=begin_s, end_s=end_s, shares=()))
            case RlSpanKind.SHARE:
                job = jobs.pop()
                share = Share(
                    thread=thread,
                    num_tiles=tiles,
                    begin_s=begin_s,
                    end_s=end_s,
                    busy_s=busy / 1e9,
                )
                jobs.append(
                    TileJob(
                        num_tiles=job.num_tiles,
                        begin_s=job.begin_s,
                        end_s=job.end_s,
                        shares=(*job.shares, share),
                    )
                )
            case RlSpanKind.OP:
                name, ops = _named(number, model_ops, native)
                found.append(
                    OpSpan(
                        name=name,
                        ops=ops,
                        begin_s=begin_s,
                        end_s=end_s,
                        num_threads=num_threads,
                        jobs=tuple(jobs),
                    )
                )
                jobs = []
    return found


def _named(
    number: int, model_ops: Sequence[Op], native: Sequence[int]
) -> tuple[str, tuple[int, ...]]:
    if number in _PART_NAMES:
        return _PART_NAMES[RlPart(number)], ()
    place = len(model_ops) - 1 if number == RlPart.HEAD else native[number]
    return type(model_ops[place]).__name__, (place,)
