"""The machine of a command that predicts: this one, calibrated, or one of the catalogue."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.display import loading_bar
from ridgeline.cli.options import Parser
from ridgeline.core.config import DEFAULT_KV_SHARE
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.host import available_memory_bytes
from ridgeline.executors import default_executor, executor_traits
from ridgeline.kernels.cpu.library import native_level
from ridgeline.roofline.calibration import (
    Calibration,
    calibration_path,
    disturbance,
    load,
    measured_elsewhere,
    save,
)

if TYPE_CHECKING:
    from ridgeline.planning import Machine

THIS = "this"
_LOOK_S, _BUSY_SHARE = 1.0, 0.25


def add_machine_options(parser: Parser, *, default: str | None) -> None:
    """--hardware and what is assumed of it."""
    parser.add_argument(
        "--hardware", default=default, metavar="NAME", help="this, or a device of the catalogue"
    )
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="devices of your own")
    parser.add_argument("--executor", default="auto", metavar="NAME", help="for --hardware this")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine again (minutes)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="with --calibrate: in about 90 s, with wider intervals"
    )


def check_machine_options(arguments: argparse.Namespace) -> None:
    """Refuse what is about this machine where another is named. Raises `InvalidRequestError`."""
    if arguments.quick and not arguments.calibrate:
        raise InvalidRequestError(
            "--quick is of --calibrate; the first time it is quick by itself."
        )
    if (arguments.hardware or THIS).lower() == THIS:
        return
    for option, is_given in (
        ("--executor", arguments.executor != "auto"),
        ("--calibrate", arguments.calibrate),
    ):
        if is_given:
            raise InvalidRequestError(f"{option} is for --hardware this.")


def this_calibration(arguments: argparse.Namespace) -> Calibration:
    """The calibration of this machine: from its file, or measured now and kept.

    Raises what `calibration_of` does.
    """
    executor = default_executor() if arguments.executor == "auto" else arguments.executor
    return calibration_of(executor, anew=arguments.calibrate, quick=arguments.quick)


def kept_calibration(executor: str) -> Calibration | None:
    """What `calibration_of` has measured here before, if it has. Raises `CorruptFileError`."""
    found = load(calibration_path(executor))
    return None if found is None or measured_elsewhere(found, native_level()) else found


def calibration_of(executor: str, *, anew: bool, quick: bool = False) -> Calibration:
    """An executor's calibration on this machine, measured if there is none, or ``anew``.

    The first one is quick. One that was interrupted goes on.

    Raises:
        CorruptFileError, DiskError: the file is damaged, or cannot be written.
        SettingsError: there is no such executor.
        InvalidRequestError: its steps cannot be calibrated; or, with ``anew``, other processes work
            now, and what there is was measured without them.
    """
    from ridgeline.bench.calibration import calibrate_here, check_executor

    check_executor(executor)
    path = calibration_path(executor)
    if anew:
        _check_idle(kept_calibration(executor))
    found = None if anew else load(path)
    if found is not None and (elsewhere := measured_elsewhere(found, native_level())):
        print(elsewhere, file=sys.stderr)
        found = None
    if found is None:
        quick = quick or not anew
        how = "about 90 s (--calibrate measures more, in minutes)" if quick else "5 to 15 minutes"
        print(
            f"Calibrating the {executor} executor here, once: {how} on an idle machine. If it is "
            "interrupted its whole rounds are kept, and the same command goes on.",
            file=sys.stderr,
        )
        kept = path.with_suffix(".quick" if quick else ".full")
        try:
            with loading_bar(of_bytes=False) as progress:
                found = calibrate_here(executor, quick=quick, kept_path=kept, progress=progress)
        except KeyboardInterrupt:
            told = "The rounds so far are" if kept.exists() else "No round was whole: nothing is"
            print(f"Stopped. {told} kept.", file=sys.stderr)
            raise
        save(found, path)
        if (disturbed := disturbance(found)) is not None:
            print(f"The calibration is kept, but {disturbed}.", file=sys.stderr)
    return found


def _check_idle(kept: Calibration | None) -> None:
    if kept is None or kept.ceilings.conditions.get("contended"):
        return
    from ridgeline.bench.conditions import Watch

    watch = Watch()
    time.sleep(_LOOK_S)
    if (share := watch.others_share()) > _BUSY_SHARE:
        raise InvalidRequestError(
            f"Other processes take {share:.0%} of the processors. The calibration of "
            f"{kept.created[:10]} was measured without any, and one measured beside them would be "
            "worse: begin it when they are idle."
        )


def this_machine(calibration: Calibration) -> "Machine":
    """This machine as plans take it."""
    from ridgeline.planning import Machine

    memory_bytes, kv_share = this_engine_memory(calibration.executor)
    return Machine(
        key=THIS,
        name=calibration.ceilings.name,
        calibration=calibration,
        memory_bytes=memory_bytes,
        kv_share=kv_share,
    )


def this_engine_memory(executor: str) -> tuple[float, float | None]:
    """Bytes for weights and KV, and the share of what weights leave that an engine here gives KV;
    ``None`` where it is all but a reserve, on a GPU."""
    device_bytes = executor_traits(executor).device_bytes()
    if device_bytes is not None:
        return device_bytes, None
    return float(available_memory_bytes()), DEFAULT_KV_SHARE
