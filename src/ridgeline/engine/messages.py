"""What the front of an `AsyncEngine` and its worker say to each other."""

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.core.config import ResolvedConfig
from ridgeline.core.request import CompletionChunk, Request
from ridgeline.engine.info import LoadSummary
from ridgeline.engine.stats import EngineStats
from ridgeline.kvcache import MissReport


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request; `Output`, `Pooled` or `Refused` follow."""

    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request in any state; nothing follows."""

    number: int


class DeleteTenant(msgspec.Struct, tag=True, frozen=True):
    """Forget all cached KV that was computed for a tenant; `Deleted` follows."""

    tenant: str


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Keep what is cached of a request's prompt; `Pinned` or `Refused` follows."""

    request: Request


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """Let go of what a `Pinned` named; nothing follows."""

    prefix: int


class Explain(msgspec.Struct, tag=True, frozen=True):
    """Say how far a request's prompt is cached; `Explained` follows."""

    request: Request


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Record the next steps; `Profiled` follows, with the same number."""

    number: int
    num_steps: int
    by_layer: bool


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """End a recording early, if it is still that one; what there is follows as `Profiled`."""

    number: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the worker, whatever is in progress."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Bytes done and bytes in all of what is being loaded."""

    done: int
    total: int
    label: str


class Started(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    config: ResolvedConfig
    kv_digest: str
    summary: LoadSummary


class Output(msgspec.Struct, tag=True, frozen=True):
    """What a step added; several chunks of one sample are in order."""

    chunks: list[CompletionChunk]


class Pooled(msgspec.Struct, tag=True, frozen=True):
    """The embedding of a request, float32 ``[hidden]``; the request has ended."""

    number: int
    vector: npt.NDArray[np.float32]


class Pinned(msgspec.Struct, tag=True, frozen=True):
    """The answer to the `Pin` of a request: the prefix's number, and its tokens that are kept."""

    number: int
    prefix: int
    num_tokens: int


class Explained(msgspec.Struct, tag=True, frozen=True):
    """The answer to the `Explain` of a request."""

    number: int
    report: MissReport


class Deleted(msgspec.Struct, tag=True, frozen=True):
    """Nothing that was cached for a tenant is left, in memory or on disk."""

    tenant: str


class Profiled(msgspec.Struct, tag=True, frozen=True):
    """A profile, as JSON."""

    number: int
    profile: bytes


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request ended without output; ``error`` names a class of `ridgeline.core.errors`.

    ``retry_after_s`` is that of an `OverloadedError`.
    """

    number: int
    error: str
    message: str
    retry_after_s: float | None = None


class Report(msgspec.Struct, tag=True, frozen=True):
    """The latest counters."""

    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker ends; every request in progress is lost. ``error`` as in `Refused`."""

    error: str
    message: str


class Lost(msgspec.Struct, tag=True, frozen=True):
    """The worker died and another one starts; what was in it is gone. Made by the front."""

    message: str


class Pulse(msgspec.Struct, frozen=True):
    """The worker's process runs: its last step, whether it has work, its processor time so far."""

    step_id: int
    is_busy: bool
    cpu_s: float


Command = Add | Abort | DeleteTenant | Pin | Unpin | Explain | StartProfile | StopProfile | Stop
Reply = Pinned | Explained | Profiled
Event = Loading | Started | Output | Pooled | Reply | Deleted | Refused | Report | Failed | Lost
