"""Running what answers to published figures, within a budget, and going on where it ended."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.bench.conditions import Watch
from ridgeline.bench.figures.figure import Figure
from ridgeline.core.host import cpu_name, usable_cores
from ridgeline.roofline.storage import cache_folder, write_json

_MAX_AGE_S = 86_400.0
_LEAST_S = 20.0  # that a command is given

Run = Callable[[str, Path, float], Any]  # a command, a folder for files, seconds at the most
Progress = Callable[[int, int, str], None]


class CommandFailedError(Exception):
    """A command of ours ended with an error, or did not end in time; the message says which."""


class Answers:
    """What commands printed and figures came to, in a file of this machine and version, for a day:
    so that a run which was interrupted, or whose budget ended, goes on where it was."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or cache_folder()
        self.scratch = folder / "figures"
        self._path = folder / "figures.json"
        self._key = [ridgeline.__version__, cpu_name()]
        self._found: dict[str, Any] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["key"] == self._key and 0 <= time.time() - kept["time_s"] < _MAX_AGE_S:
                self._found = dict(kept["answers"])

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def get(self, name: str, make: Callable[[], Any]) -> Mapping[str, Any]:
        """An answer of before, or a new one, with its seconds, date and what others took then."""
        if name not in self._found:
            watch, start = Watch(), time.monotonic()
            answer = make()
            seconds, conditions = time.monotonic() - start, watch.conditions(threads=usable_cores())
            self._found[name] = {
                "answer": answer,
                "seconds": round(seconds, 1),
                "date": conditions["date"],
                "others_share": conditions["others_share"],
            }
            self._save()
        return dict(self._found[name])

    def forget(self, names: Iterable[str]) -> None:
        """These are done."""
        for name in names:
            self._found.pop(name, None)
        if self._found:
            self._save()
            return
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _save(self) -> None:
        kept = {"key": self._key, "time_s": time.time(), "answers": self._found}
        write_json(self._path, kept)


def reproduce(
    figures: Sequence[Figure],
    answers: Answers,
    *,
    budget_s: float,
    progress: Progress | None = None,
    run: Run | None = None,
) -> dict[str, Any]:
    """Ours beside each, as one object of plain values; what is quick comes first.

    What does not fit into the budget is not begun, and said to be left; so is what fails, with its
    error. ``run`` runs a command (`run_command`).

    Raises:
        DiskError: answers cannot be kept.
    """
    deadline_s = time.monotonic() + budget_s
    run = run or run_command
    found: dict[str, dict[str, Any]] = {}
    order = sorted(figures, key=lambda figure: figure.seconds)
    for number, figure in enumerate(order):
        if progress is not None:
            progress(number, len(order), figure.name)
        found[figure.name] = _answered(figure, answers, run, deadline_s)
    rows = [found[figure.name] for figure in figures]
    if all(row["verdict"] != "not run" for row in rows):
        answers.forget(name for each in figures for name in each.commands or (each.name,))
    return {
        "machine": cpu_name(),
        "cores": usable_cores(),
        "version": ridgeline.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "figures": rows,
    }


def _answered(figure: Figure, answers: Answers, run: Run, deadline_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "row": figure.row,
        "what": figure.what,
        "published": figure.published,
        "low": figure.low,
        "high": figure.high,
        "unit": figure.unit,
        "commands": [f"ridgeline {command}" for command in figure.commands],
        "note": figure.note,
        "ours": None,
        "verdict": "not here",
        "why_not": figure.why_not,
        "seconds": 0.0,
        "others_share": 0.0,
    }
    if figure.ours is None:
        return row
    parts = []
    try:
        for name in figure.commands or (figure.name,):
            left_s = deadline_s - time.monotonic()
            needed_s = figure.seconds / max(1, len(figure.commands))
            if name not in answers and left_s < needed_s:
                raise CommandFailedError(f"{name}: it takes {needed_s:.0f} s, more than were left.")
            timeout_s = max(_LEAST_S, left_s)
            make = (
                partial(run, name, answers.scratch, timeout_s)
                if figure.commands
                else partial(figure.ours, ())
            )
            parts.append(answers.get(name, make))
        found = [part["answer"] for part in parts]
        ours = figure.ours(found) if figure.commands else found[0]
    except CommandFailedError as error:
        return row | {"verdict": "not run", "why_not": str(error)}
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        why_not = f"What was printed does not answer it: {error!r}."
        return row | {"verdict": "not run", "why_not": why_not}
    return row | {
        "ours": ours,
        "verdict": figure.verdict(ours),
        "seconds": sum(part["seconds"] for part in parts),
        "others_share": max(part["others_share"] for part in parts),
    }


def run_command(command: str, scratch: Path, timeout_s: float) -> Any:
    """What a command of ours prints with ``--json``, from a process of its own.

    Raises:
        CommandFailedError: it failed, or took too long.
    """
    words = [word.format(scratch=scratch) for word in shlex.split(command)]
    scratch.mkdir(parents=True, exist_ok=True)
    makes = words[words.index("-o") + 1] if "-o" in words else None
    if makes is not None:
        shutil.rmtree(makes, ignore_errors=True)  # what an interrupted run left
    else:
        words.append("--json")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "ridgeline", *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=os.environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandFailedError(
            f"It took more than the {timeout_s:.0f} s that were left."
        ) from None
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise CommandFailedError(f"ridgeline {command}: {lines[-1]}")
    return {} if makes is not None else json.loads(ended.stdout)
