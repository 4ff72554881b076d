"""Ridgeline beside its peers: one run, engines in turns, each cell at each engine's best setting.

``python -m benchmarks.peers.run --shape llama-3.2-1b [--quick]`` from the repository's root, after
``install`` and ``models``. Settings are chosen first (or taken from the last choice on this
machine, kept below ``build/``); then every engine measures every cell once in each round. Medians
and ratios go to ``benchmarks/results/DATE-SHAPE.json``, a table of them to the terminal.

``--quick`` leaves out the cells that take long and the choice of settings: without an earlier one,
each engine runs with the first of its grid.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, Engine
from benchmarks.peers.grid import CELLS, TRIED, Cell, Setting
from benchmarks.peers.models import SHAPES
from benchmarks.peers.paths import REPOSITORY, RESULTS, model_folder
from benchmarks.peers.table import markdown

from ridgeline.bench.ceilings import measure_ceilings
from ridgeline.bench.conditions import Watch
from ridgeline.bench.native_loops import load_native_loops
from ridgeline.core.host import usable_cores

QUICK_CELLS = ("prefill 512", "decode 1", "decode 8", "decode 32")
_QUICK_ROUNDS, _ROUNDS = 2, 5
_QUIET_SHARE = 0.1


@dataclass(kw_only=True)
class Figures:
    """What one engine reached in one cell: a rate for each round, and who disturbed it."""

    setting: Setting
    rates: list[float] = field(default_factory=list)
    others_share: list[float] = field(default_factory=list)
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Median, best, and all rates."""
        return {
            "setting": dict(self.setting),
            "median_tok_s": statistics.median(self.rates) if self.rates else None,
            "best_tok_s": max(self.rates, default=None),
            "rates_tok_s": [round(rate, 2) for rate in self.rates],
            "others_share": [round(share, 3) for share in self.others_share],
            "error": self.error,
        }


class Run:
    """One comparison of some engines on one shape."""

    def __init__(
        self, shape: str, engines: Sequence[Engine], cells: Sequence[Cell], *, wait_s: float
    ) -> None:
        self.shape, self.engines, self.cells, self.wait_s = shape, engines, cells, wait_s
        self.cores = usable_cores()
        self.figures: dict[str, dict[str, Figures]] = {}

    def choose(self, *, quick: bool, again: bool) -> None:
        """Give each cell of each engine its setting: the fastest of the grid, or the first."""
        path = model_folder(self.shape) / "best.json"
        known = json.loads(path.read_text()) if path.exists() and not again else {}
        for engine in self.engines:
            kinds = known.setdefault(engine.name, {})
            for kind in {cell.kind for cell in self.cells} - set(kinds):
                if quick:
                    kinds[kind] = {cell.name: engine.grid[kind][0] for cell in TRIED[kind]}
                    continue
                kinds[kind] = self._best(engine, kind)
                path.write_text(json.dumps(known, indent=1))
            self.figures[engine.name] = {
                cell.name: Figures(setting=kinds[cell.kind][self._nearest(cell)])
                for cell in self.cells
            }

    def measure_round(self) -> None:
        """Every cell of every engine once; cells of one setting share a process."""
        for engine in self.engines:
            by_setting: dict[str, list[Cell]] = {}
            for cell in self.cells:
                key = json.dumps(dict(self.figures[engine.name][cell.name].setting))
                by_setting.setdefault(key, []).append(cell)
            for key, cells in by_setting.items():
                rates, share, error = self._measure(engine, json.loads(key), cells)
                for cell in cells:
                    figures = self.figures[engine.name][cell.name]
                    figures.error = error
                    if error is None:
                        figures.rates.append(rates[cell.name])
                        figures.others_share.append(share)

    def _best(self, engine: Engine, kind: str) -> dict[str, Setting]:
        """The fastest setting for each of the cells that stand for a kind."""
        settings = engine.grid[kind]
        tried = TRIED[kind]
        if len(settings) == 1:
            return {cell.name: settings[0] for cell in tried}
        best: dict[str, tuple[float, Setting]] = {}
        for setting in settings:
            rates, _, error = self._measure(engine, setting, tried)
            if error is not None:
                continue
            for name, rate in rates.items():
                best[name] = max(best.get(name, (0.0, setting)), (rate, setting), key=_first)
        return {cell.name: best.get(cell.name, (0.0, settings[0]))[1] for cell in tried}

    @staticmethod
    def _nearest(cell: Cell) -> str:
        """Of the cells that were tried, the one whose setting this cell takes."""
        tried = TRIED[cell.kind]
        return max((t for t in tried if t.batch <= cell.batch), key=lambda t: t.batch).name

    def _measure(
        self, engine: Engine, setting: Setting, cells: Sequence[Cell]
    ) -> tuple[dict[str, float], float, str | None]:
        wait_for_quiet(self.wait_s)
        watch, start = Watch(), time.monotonic()
        rates: dict[str, float] = {}
        error = None
        try:
            rates = engine.measure(self.shape, setting, cells, self.cores)
        except RuntimeError as failure:
            error = str(failure)
        share = watch.others_share()
        shown = " ".join(f"{name} {rate:.1f}" for name, rate in rates.items()) or error
        print(
            f"{engine.name} {json.dumps(dict(setting))}: {shown} "
            f"({time.monotonic() - start:.0f} s, others {share:.0%})",
            file=sys.stderr,
            flush=True,
        )
        return rates, share, error


def wait_for_quiet(seconds: float) -> None:
    """Wait, at most so long, until other processes leave the machine alone for a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch = Watch()
        time.sleep(1.0)
        if watch.others_share() < _QUIET_SHARE:
            return


def machine() -> str:
    """The kind of processor: a virtual machine tells its family and flags, seldom its name."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    about = {key.strip(): value.strip() for key, _, value in lines}
    flags = about["flags"].split()
    if about["vendor_id"] != "AuthenticAMD":
        return f"{about['model name']} ({'AMX' if 'amx_int8' in flags else 'AVX-512'})"
    if about["cpu family"] == "26":
        return "AMD EPYC Zen 5 (AVX-512, BF16)"
    if "avx512_bf16" in flags:
        return "AMD EPYC Zen 4 (AVX-512 at half rate, BF16)"
    return "AMD EPYC Zen 3 (AVX2)"


def report(run: Run, ceilings: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The results file: figures, and ratios of our medians to each peer's of the same weights."""
    figures = {
        engine: {cell: found.to_json() for cell, found in cells.items()}
        for engine, cells in run.figures.items()
    }
    ratios: dict[str, dict[str, float]] = {}
    for ours in (engine for engine in run.engines if engine.is_ours):
        for peer in run.engines:
            if peer.is_ours or peer.weights != ours.weights:
                continue
            both = {
                cell.name: (
                    figures[ours.name][cell.name]["median_tok_s"],
                    figures[peer.name][cell.name]["median_tok_s"],
                )
                for cell in run.cells
            }
            ratios[f"{ours.name} / {peer.name}"] = {
                name: round(a / b, 3) for name, (a, b) in both.items() if a and b
            }
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return {
        "machine": machine(),
        "shape": run.shape,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision.stdout.strip(),
        "seconds": round(seconds),
        "ceilings": ceilings,
        "figures": figures,
        "ratios": ratios,
    }


def main() -> None:
    """Choose settings, measure in rounds, write the results and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--quick", action="store_true", help="few cells, two rounds, ≤8 minutes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--again", action="store_true", help="choose the settings again")
    parser.add_argument("--engines", nargs="*", default=[engine.name for engine in ENGINES])
    parser.add_argument("--cells", nargs="*")
    parser.add_argument("--wait", type=float, default=5.0, metavar="S",
                        help="wait for a quiet machine before each measurement")  # fmt: skip
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.cells or (QUICK_CELLS if options.quick else [cell.name for cell in CELLS])
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    start = time.monotonic()
    run = Run(
        options.shape,
        [engine for engine in ENGINES if engine.name in options.engines],
        [cell for cell in CELLS if cell.name in names],
        wait_s=options.wait,
    )
    run.choose(quick=options.quick, again=options.again)
    loops = load_native_loops()
    ceilings = [measure_ceilings(loops, rounds=1)]
    for _ in range(rounds):
        run.measure_round()
        ceilings.append(measure_ceilings(loops, rounds=1))
    middle = sorted(ceilings, key=lambda found: found.memory_bytes_per_s)[len(ceilings) // 2]
    result = report(run, middle.to_json(), time.monotonic() - start)
    out = options.out or _unused(RESULTS / f"{result['date'][:10]}-{options.shape}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    print(out)


def _unused(stem: Path) -> Path:
    """The file of a run: another on the same day has another, whatever machine it was on."""
    names = chain([""], (f"-{number}" for number in count(2)))
    paths = (stem.with_name(f"{stem.name}{name}.json") for name in names)
    return next(path for path in paths if not path.exists())


def _first(pair: tuple[float, Setting]) -> float:
    return pair[0]


if __name__ == "__main__":
    main()
