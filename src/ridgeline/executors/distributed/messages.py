"""What a driver and its ranks say to each other."""

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import NumberFormat
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.result import StepResult


class Begin(msgspec.Struct, tag=True, frozen=True):
    """What a rank is told first: to load its part of the models of ``config``, which is that of one
    process. `Loaded` or `RankFailed` follows.

    With ``sizes`` it loads nothing, and measures exchanges of parts of these bytes: then
    `LinksMeasured`.
    """

    layout: ParallelLayout
    rank: int
    num_threads: int
    config: EngineConfig | None = None
    sizes: tuple[int, ...] = ()


class Allocate(msgspec.Struct, tag=True, frozen=True):
    """Make the KV pool of a model; `Done` follows."""

    number: int
    role: ModelRole
    num_blocks: list[int]


class RunPlan(msgspec.Struct, tag=True, frozen=True):
    """Run a plan; `Ran` follows."""

    plan: StepPlan


class Masks(msgspec.Struct, tag=True, frozen=True):
    """Masks of some segments (pass, segment) of a plan that was sent before."""

    step_id: int
    segments: list[tuple[int, int]]
    masks: list[npt.NDArray[np.uint32]]


class AbortStep(msgspec.Struct, tag=True, frozen=True):
    """The masks of a plan will not come: it fails."""

    step_id: int


class Export(msgspec.Struct, tag=True, frozen=True):
    """Send the rank's part of some KV blocks; `Done` follows, with their bytes."""

    number: int
    role: ModelRole
    group: int
    blocks: list[int]


class Import(msgspec.Struct, tag=True, frozen=True):
    """Write the rank's part of some KV blocks; `Done` follows."""

    number: int
    role: ModelRole
    group: int
    blocks: list[int]
    data: bytes


class LoadedRole(msgspec.Struct, frozen=True):
    """One of a rank's models: the KV blocks of its part, and what it holds weights in."""

    block_bytes: tuple[int, ...]
    digest: str
    formats: Mapping[str, NumberFormat]


class LinksMeasured(msgspec.Struct, tag=True, frozen=True):
    """Seconds of an exchange of each of the sizes that were asked for."""

    seconds: list[float]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The rank has its part of the models. ``link_s`` are seconds of exchanges of `links.SIZES`
    with the others of its stage, or else with the next stage."""

    kernels: str
    link_s: list[float]
    roles: Mapping[ModelRole, LoadedRole]


class Ran(msgspec.Struct, tag=True, frozen=True):
    """A plan was run, says a rank of the last stage. ``result`` is there if it is the first of
    them; ``checksum`` is of its tokens."""

    step_id: int
    checksum: int
    result: StepResult | None


class Done(msgspec.Struct, tag=True, frozen=True):
    """A numbered command was carried out."""

    number: int
    data: bytes = b""


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """The rank ends. ``error`` names a class of `ridgeline.core.errors`."""

    error: str
    message: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Now and then: seconds of processor time and of steps so far, without those that it waited
    for other stages; bytes sent to other ranks and exchanges with them. Of a stage's ranks the
    first has its layers' `Executor.expert_tokens`."""

    cpu_s: float
    busy_s: float
    sent_bytes: int
    num_exchanges: int
    expert_tokens: Mapping[str, npt.NDArray[np.int64]] = {}


Command = Begin | Allocate | RunPlan | Masks | AbortStep | Export | Import
Report = LinksMeasured | Loaded | Ran | Done | RankFailed | Alive
