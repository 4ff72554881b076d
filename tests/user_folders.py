"""The folders of a user, for tests: empty ones, or ones that are full of a user's things.

No test may find what the person who runs it keeps, and none may depend on finding nothing.
"""

import os
import shutil
import tempfile
from pathlib import Path

VARIABLES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")

OWN_DEVICE = """
[sources]
invoice = "What was paid for it"

[devices.workstation]
name = "Workstation"
memory_gb = { value = 24, source = "invoice", confidence = "high" }
bandwidth_tbps = { value = 0.9, source = "invoice", confidence = "high" }
tflops.bfloat16 = { value = 70, source = "invoice", confidence = "low" }
"""


def use_own_folders(*, full: bool) -> Path:
    """Point this process and its children to fresh folders; returns the one that holds them all."""
    base = Path(tempfile.mkdtemp(prefix="ridgeline-tests-"))
    # Font lists and downloaded models are no settings; making them anew would take seconds.
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("HF_HOME", str(home / "huggingface"))
    os.environ.setdefault("MPLCONFIGDIR", str(home / "matplotlib"))
    for variable in VARIABLES:
        os.environ[variable] = str(base / variable.split("_")[1].lower())
    if full:
        _fill()
    return base


def remove(base: Path) -> None:
    """Delete what `use_own_folders` made."""
    shutil.rmtree(base, ignore_errors=True)


def _fill() -> None:
    from dataclasses import replace

    import msgspec

    from ridgeline.executors import executor_names
    from ridgeline.roofline.calibration import calibration_path, save, typical
    from ridgeline.roofline.catalogue import load_catalogue
    from ridgeline.roofline.history import history_path
    from ridgeline.roofline.storage import cache_folder, config_folder, write_json
    from ridgeline.server.jobs.database import Database
    from ridgeline.server.jobs.folder import default_folder

    config_folder().mkdir(parents=True)
    (config_folder() / "hardware.toml").write_text(OWN_DEVICE)
    assert "workstation" in load_catalogue().devices
    ceilings = replace(load_catalogue().device("l4").ceilings(), measured=True)
    for name in executor_names():
        calibration = msgspec.structs.replace(typical(ceilings), executor=name)
        save(calibration, calibration_path(name))
    write_json(history_path(), {"runs": [_run(number) for number in range(200)]})
    for folder in ("packed", "tuned"):
        (cache_folder() / folder).mkdir()
        (cache_folder() / folder / "from-another-version").write_bytes(b"\0" * 100)
    Database(default_folder(8000)).close()


def _run(number: int) -> dict[str, object]:
    return {
        "date": f"2026-01-01T00:{number // 60:02}:{number % 60:02}+00:00",
        "model": "a-model",
        "executor": "cpu",
        "steps": 20 + number,
        "prefill_error": 0.1,
        "decode_error": 0.05,
        "covered": 0.8,
    }
