"""What routers hear of how much of itself an engine uses."""

import dataclasses

import pytest

from ridgeline.roofline.live import PhaseReport, RooflineReport
from ridgeline.server import live
from ridgeline.server.live import RecentUse

NOTHING = PhaseReport(
    seconds=0.0, steps=0, tokens=0, useful_flops=0.0, moved_bytes=0.0, mfu=None, mbu=None,
    bound=None, predicted_s=None, median_error=None,
)  # fmt: skip


def report(prefill_s, decode_s, *, mbu):
    """Of a machine whose prompts move 1 byte a second, and decodes 10."""
    phases = {
        name: dataclasses.replace(
            NOTHING, seconds=seconds, moved_bytes=rate * seconds, mbu=mbu and rate / mbu
        )
        for name, seconds, rate in (("prefill", prefill_s, 1.0), ("decode", decode_s, 10.0))
    }
    return RooflineReport(
        **phases, num_steps=1, num_pending=0, drafted=0, accepted=0, overhead_s_per_step=0.0,
        covered=None, warnings=(), conditions={}, levels={},
    )  # fmt: skip


def test_shares_are_of_the_last_seconds_and_over_both_phases(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(live.time, "monotonic", lambda: now_s)
    recent = RecentUse()
    assert recent.shares(None) == (None, None)
    assert recent.shares(report(50.0, 50.0, mbu=20.0)) == (None, None)  # nothing to compare with
    now_s += 4
    assert recent.shares(report(51.0, 51.0, mbu=20.0)) == (0.5, pytest.approx(11 / 40))
    now_s += 20
    assert recent.shares(report(52.0, 51.0, mbu=20.0)) == (0.05, pytest.approx(1 / 20))
    now_s += 1
    assert recent.shares(report(52.0, 51.0, mbu=20.0)) == (0.0, None)  # idle since
    now_s += 1
    assert recent.shares(report(52.0, 52.0, mbu=None)) == (0.5, None)  # without a calibration
