"""Energy is what counters say, or unknown."""

import doctest

import pytest

from ridgeline.bench import energy


def test_worked_examples():
    outcome = doctest.testmod(energy)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_energy_is_unknown_without_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_read_gpus", lambda: None)
    meter = energy.EnergyMeter(root=tmp_path)
    meter.start()
    spent = meter.stop()
    assert not spent.valid
    assert spent.joules is None
    assert spent.per_token(10) is None


def test_energy_counters_that_wrap(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_read_gpus", lambda: None)
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "energy_uj").write_text("9000000\n")
    (zone / "max_energy_range_uj").write_text("10000000\n")
    meter = energy.EnergyMeter(root=tmp_path)
    meter.start()
    (zone / "energy_uj").write_text("2000000\n")
    spent = meter.stop()
    assert spent.valid
    assert spent.joules == pytest.approx(3.0)
    (zone / "energy_uj").unlink()
    assert not meter.stop().valid
