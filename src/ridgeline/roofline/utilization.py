"""MFU and MBU of a stretch of time, from two reports of a running engine."""

from dataclasses import dataclass

from ridgeline.roofline.live import PhaseReport, RooflineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """What a phase did in between; ``mfu`` and ``mbu`` are shares of the ceilings (1.0 is all),
    ``None`` without a calibration."""

    seconds: float
    tokens: int
    useful_flops: float
    moved_bytes: float
    mfu: float | None
    mbu: float | None


def utilization_between(
    before: RooflineReport | None, now: RooflineReport | None
) -> dict[str, Utilization]:
    """Of each phase that did something since ``before``; all of it if the engine began anew."""
    if now is None:
        return {}
    found = {}
    for name in ("prefill", "decode"):
        new: PhaseReport = getattr(now, name)
        old: PhaseReport | None = None if before is None else getattr(before, name)
        if old is not None and old.seconds > new.seconds:
            old = None
        use = _between(old, new)
        if use.seconds > 0 and use.moved_bytes > 0:
            found[name] = use
    return found


def _between(old: PhaseReport | None, new: PhaseReport) -> Utilization:
    seconds = new.seconds - (old.seconds if old else 0.0)
    flops = new.useful_flops - (old.useful_flops if old else 0.0)
    moved = new.moved_bytes - (old.moved_bytes if old else 0.0)
    peak_flops = _ceiling(new.useful_flops, new.mfu) - (
        _ceiling(old.useful_flops, old.mfu) if old else 0.0
    )
    peak_bytes = _ceiling(new.moved_bytes, new.mbu) - (
        _ceiling(old.moved_bytes, old.mbu) if old else 0.0
    )
    return Utilization(
        seconds=seconds,
        tokens=new.tokens - (old.tokens if old else 0),
        useful_flops=flops,
        moved_bytes=moved,
        mfu=flops / peak_flops if peak_flops > 0 else None,
        mbu=moved / peak_bytes if peak_bytes > 0 else None,
    )


def _ceiling(amount: float, share: float | None) -> float:
    """What the machine could have done in the time in which it did ``amount``."""
    return amount / share if share else 0.0


def roof_of(report: RooflineReport | None) -> dict[str, float] | None:
    """The machine's ceilings, FLOP/s and bytes/s; ``None`` where they were not measured."""
    for phase in () if report is None else (report.decode, report.prefill):
        if phase.mfu and phase.mbu and phase.seconds:
            return {
                "flops": _ceiling(phase.useful_flops, phase.mfu) / phase.seconds,
                "bandwidth": _ceiling(phase.moved_bytes, phase.mbu) / phase.seconds,
            }
    return None
