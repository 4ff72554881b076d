"""What an executor's recording of steps says: which op ran when, and what its threads did.

Times are seconds of the system's monotonic clock (`time.perf_counter`).
"""

from dataclasses import dataclass

from ridgeline.core.plan import ModelRole, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One thread's part of a job, from its first tile to its last; ``busy_s`` is within tiles."""

    thread: int
    num_tiles: int
    begin_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TileJob:
    """Tiles that threads share out, and the barrier at their end."""

    num_tiles: int
    begin_s: float
    end_s: float
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpan:
    """Ops that ran as one, or another part of a forward pass.

    Attributes:
        name: of the kinds of ops, or of what is none: sampling, rotary tables.
        ops: their places among the model's ops; empty for what is none.
        num_threads: that could work. On a device, or where nothing is known of threads, 1.
        jobs: in order; what lies between them is done by one thread.
    """

    name: str
    ops: tuple[int, ...]
    begin_s: float
    end_s: float
    num_threads: int = 1
    jobs: tuple[TileJob, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def shared_s(self) -> float:
        """In jobs of several tiles for several threads."""
        return sum(job.end_s - job.begin_s for job in self._shared)

    @property
    def work_s(self) -> float:
        """In tiles of such jobs, the mean of all threads; everything where there is one thread."""
        if self.num_threads == 1:
            return self.seconds
        busy = sum(share.busy_s for job in self._shared for share in job.shares)
        return busy / self.num_threads

    @property
    def wait_s(self) -> float:
        """At barriers and for work, the mean of all threads."""
        return self.shared_s - self.work_s if self.num_threads > 1 else 0.0

    @property
    def serial_s(self) -> float:
        """One thread works, the others have nothing to do."""
        return self.seconds - self.shared_s if self.num_threads > 1 else 0.0

    @property
    def work_begin_s(self) -> float:
        """When the first thread began."""
        return min((s.begin_s for job in self.jobs for s in job.shares), default=self.begin_s)

    @property
    def work_end_s(self) -> float:
        """When the last thread had done its part."""
        return max((s.end_s for job in self.jobs for s in job.shares), default=self.end_s)

    @property
    def _shared(self) -> tuple[TileJob, ...]:
        return tuple(job for job in self.jobs if job.num_tiles > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    """One forward pass: number ``step`` of pass ``pass_index`` of its plan."""

    role: ModelRole
    pass_index: int
    step: int
    spans: tuple[OpSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A plan that ran, from the moment that the executor took it up to that of its result."""

    plan: StepPlan
    begin_s: float
    end_s: float
    passes: tuple[RecordedPass, ...]
