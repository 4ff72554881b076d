"""What an engine is doing, as counters and as one word."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from ridgeline.core.speculation_figures import SpeculationFigures
from ridgeline.kvcache.tiers import PeerFigures
from ridgeline.roofline.live import RooflineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One executed step: when its result was here, how long it took, and what was in it.

    ``num_tokens`` were computed, ``num_sequences`` of them at once; ``num_steps`` > 1 is a replay.
    ``finished_s`` is on the ``time.monotonic`` clock.
    """

    step_id: int
    finished_s: float
    seconds: float
    num_tokens: int
    num_sequences: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and the state now.

    ``kv_usage`` is the held share of the fullest KV group's pool (cached blocks that nobody holds
    are free), and ``kv_waste`` the share of the held room in which there is no token.
    ``prefix_queries`` and ``prefix_hits`` are tokens; ``num_loads`` counts returns from the tiers,
    of a sequence or a prefix, and ``tier_blocks`` the blocks saved to them and loaded;
    ``kv_peers`` are the engines that KV is read of and given to.
    ``speculation`` is what was drafted, if anything is.
    ``last_progress_s`` is when the last step ended, on the ``time.monotonic`` clock. ``steps`` are
    the latest steps, oldest first;
    ``roofline`` is what all steps reached of the machine's ceilings.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    kv_waste: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_loads: int = 0
    tier_blocks: tuple[int, int] = (0, 0)
    kv_peers: PeerFigures | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    speculation: SpeculationFigures | None = None
    step_id: int = 0
    last_progress_s: float = field(default_factory=time.monotonic)
    num_restarts: int = 0
    steps: tuple[StepRecord, ...] = ()
    roofline: RooflineReport | None = None


class EngineStatus(StrEnum):
    """Whether an engine takes requests, and if not, why."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``reason`` is a sentence for people, empty when all is well."""

    status: EngineStatus
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        return self.status is EngineStatus.READY
