"""A machine of which something is known already."""

from dataclasses import replace

import msgspec
import pytest

from ridgeline.roofline.calibration import calibration_path, save, typical
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.history import Run, history_path
from ridgeline.roofline.storage import write_json


@pytest.fixture
def calibrated(monkeypatch, tmp_path):
    """A machine whose calibration is there, and is far off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ceilings = replace(load_catalogue().device("epyc-9654").ceilings(), measured=True)
    save(msgspec.structs.replace(typical(ceilings), executor="cpu"), calibration_path("cpu"))


@pytest.fixture
def predicted_before(calibrated):
    """On which decode steps of bfloat16 were predicted before."""
    run = Run(
        date="2026-11-28", model="m", executor="cpu", steps=99, format="bfloat16", covered=0.8,
        prefill_error=None, decode_error=0.12, decode_p90=0.3, decode_bias=1.1,
    )  # fmt: skip
    write_json(history_path(), {"runs": [msgspec.to_builtins(run)]})
