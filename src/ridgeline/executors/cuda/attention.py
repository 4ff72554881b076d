"""Which attention a model runs with: that of the kernels, or of an installed FlashAttention.

Each kind of attention op is decided once, when the KV pool is there, for decode steps and for
prompts apart. What the package cannot do is left to the kernels: so are, in any pass, draft trees
and rows of a few tokens, which it was not timed at.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ridgeline.core import ops
from ridgeline.core.errors import MachineError, SettingsError
from ridgeline.executors.cuda.attention_trial import Trial, compare
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.inputs import PassInput, Short
from ridgeline.executors.cuda.kernels import AttendSpec, Kernels
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.packaged_attention import PackagedAttention, misfit
from ridgeline.kernels.flash_attention import FlashAttention
from ridgeline.kernels.triton import KVTensors

_log = logging.getLogger(__name__)

# A package that is hardly faster is not taken: the choice would change from start to start.
_WORTH = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackends:
    """What may be chosen from.

    ``wanted`` is auto, triton or flash-attn (`CUDASettings`);
    ``package`` is what is installed, or one sentence on why there is none.
    """

    wanted: str = "auto"
    package: FlashAttention | str = "FlashAttention was not looked for."

    def check(self, model_ops: Sequence[ops.Op], kv_dtype: torch.dtype, block_tokens: int) -> None:
        """Refuse a package that was asked for and cannot be used for all of a model.

        Raises:
            MachineError: it is not installed.
            SettingsError: it does not fit; says why.
        """
        if self.wanted != "flash-attn":
            return
        if isinstance(self.package, str):
            raise MachineError(f"attention_backend flash-attn cannot be used: {self.package}")
        reasons = [
            "is not used for latents" for op in model_ops if isinstance(op, ops.LatentAttend)
        ]
        for op in model_ops:
            if isinstance(op, ops.Attend):
                reasons.append(misfit(self.package, op, kv_dtype, block_tokens) or "")
        for reason in filter(None, reasons):
            raise SettingsError(
                f"attention_backend flash-attn does not fit: {self.package.name} {reason}; leave "
                "it at auto."
            )


class Kind(NamedTuple):
    """What attention ops that are decided together have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(slots=True)
class _Taken:
    """Whether the package runs decode steps, and prompts."""

    decode: bool = False
    prefill: bool = False


@dataclass(slots=True)
class _Group:
    """The ops of one kind, of which ``op`` is one."""

    op: ops.Attend
    spec: AttendSpec
    taken: _Taken = field(default_factory=_Taken)


class ModelAttention:
    """The attention ops of one model, which `op` makes and `decide` gives to one or the other."""

    def __init__(self, kernels: Kernels, backends: AttentionBackends) -> None:
        self._kernels, self._backends = kernels, backends
        self._groups: dict[Kind, _Group] = {}

    @property
    def taken(self) -> str:
        """What the package runs, and its version; empty where that is nothing."""
        package = self._backends.package
        phases = {
            phase
            for group in self._groups.values()
            for phase in ("decode", "prefill")
            if getattr(group.taken, phase)
        }
        return f"{_title(package)} for {' and '.join(sorted(phases))}" if phases else ""

    def op(
        self, op: ops.Attend, spec: AttendSpec
    ) -> Callable[[torch.Tensor, KVTensors, PassInput], torch.Tensor]:
        """What an op is run by: ``[T, H, v]`` of q ``[T, H, d]``, KV and pass."""
        taken = self._groups.setdefault(_kind(op), _Group(op, spec)).taken
        kernels, package = self._kernels, self._backends.package
        theirs = None if isinstance(package, str) else PackagedAttention.of(package, op)

        def attend(q_THd: torch.Tensor, kv: KVTensors, at: PassInput) -> torch.Tensor:
            segments, tokens, longest = at.short
            decodes = taken.decode and segments > 0 and longest == 1
            fills = taken.prefill and segments < len(at.stops_S)
            if at.tree is not None or not (decodes or fills):
                return kernels.attend(q_THd, kv, at, spec)
            assert theirs is not None
            parts = []
            if segments:
                part, q = _first(at, segments, tokens), q_THd[:tokens]
                parts.append(
                    theirs.decode(q, kv, part) if decodes else kernels.attend(q, kv, part, spec)
                )
            if segments < len(at.stops_S):
                part, q = _rest(at, segments, tokens), q_THd[tokens:]
                parts.append(
                    theirs.prefill(q, kv, part) if fills else kernels.attend(q, kv, part, spec)
                )
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def decide(
        self, device: Device, cache: DeviceKVCache, *, num_slots: int, longest: int, trial: Trial
    ) -> None:
        """Time the package beside the kernels over the pool, which holds nothing yet, and log what
        was taken. ``longest`` is the entries of a block table.

        Raises:
            MachineError: the package was asked for, and fails or computes something else.
        """
        package, wanted = self._backends.package, self._backends.wanted
        if wanted == "triton" or not self._groups:
            return
        if isinstance(package, str):
            _log.info("Attention is that of the %s kernels: %s", self._kernels.name, package)
            return
        for group in self._groups.values():
            reason = misfit(package, group.op, cache.dtype, cache.block_tokens)
            if reason is None:
                self._try(package, group, cache, trial, device, num_slots, longest)
                continue
            _log.info(
                "Attention%s is that of the %s kernels: %s %s.",
                _of(group.op),
                self._kernels.name,
                package.name,
                reason,
            )

    def _try(
        self,
        package: FlashAttention,
        group: _Group,
        cache: DeviceKVCache,
        trial: Trial,
        device: Device,
        num_slots: int,
        longest: int,
    ) -> None:
        kernels, op, spec = self._kernels, group.op, group.spec
        theirs = PackagedAttention.of(package, op)

        def ours(q: torch.Tensor, kv: KVTensors, at: PassInput) -> torch.Tensor:
            return kernels.attend(q, kv, at, spec)

        told = []
        for phase, attend in (("decode", theirs.decode), ("prefill", theirs.prefill)):
            try:
                gain = compare(
                    device,
                    cache,
                    ours,
                    attend,
                    op,
                    decodes=phase == "decode",
                    num_slots=num_slots,
                    table_blocks=longest,
                    trial=trial,
                )
            except Exception as error:  # another project's code, on a device it may not know
                problem = f"{package.name} failed in {phase}{_of(group.op)} ({error})"
                if self._backends.wanted == "flash-attn":
                    raise MachineError(f"attention_backend flash-attn: {problem}.") from error
                _log.warning("%s; the %s kernels run it.", problem, kernels.name)
                continue
            taken = gain > _WORTH or self._backends.wanted == "flash-attn"
            setattr(group.taken, phase, taken)
            name = package.name if taken else f"the {kernels.name} kernels"
            times = gain if taken else 1 / gain
            told.append(f"{phase} by {name} ({times:.2f} × as fast as the other)")
        if told:
            _log.info("Attention%s: %s.", _of(group.op), ", ".join(told))


def _first(at: PassInput, segments: int, tokens: int) -> PassInput:
    """The segments of few tokens by themselves."""
    return replace(
        at,
        positions_T=at.positions_T[:tokens],
        query_starts_S1=at.query_starts_S1[: segments + 1],
        stops_S=at.stops_S[:segments],
        tables=at.tables.part(0, segments),
        spans=None if at.spans is None else at.spans[:segments],
    )


def _rest(at: PassInput, segments: int, tokens: int) -> PassInput:
    """The others, whose rows are counted from their first."""
    assert at.spans is not None, "prompts are not recorded"
    if segments == 0:
        return at
    return replace(
        at,
        positions_T=at.positions_T[tokens:],
        query_starts_S1=at.query_starts_S1[segments:] - tokens,
        stops_S=at.stops_S[segments:],
        tables=at.tables.part(segments),
        short=Short(0, 0, 0),
        spans=tuple(
            replace(span, first=span.first - tokens, last=span.last - tokens)
            for span in at.spans[segments:]
        ),
    )


def _kind(op: ops.Attend) -> Kind:
    return Kind(
        num_heads=op.num_heads,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        scale=op.scale,
        window=op.window,
        softcap=op.softcap,
        has_sinks=op.sinks is not None,
    )


def _of(op: ops.Attend) -> str:
    """Which ops are meant, where a model has several kinds."""
    return "" if op.window is None else f" with a window of {op.window}"


def _title(package: FlashAttention | str) -> str:
    return package if isinstance(package, str) else package.name
