"""Check each instruction-set level of the CPU kernels on an emulated processor that has no more.

    python tests/emulated/run.py [--bochs PROGRAM] [--kernel IMAGE] [MODEL...]

Bochs boots a Linux kernel whose first process runs the program of csrc/tests over the installed
libraries: detection must find the levels that the processor has and choose the fastest, and every
check of the last level must pass. An instruction that the processor lacks ends the program with
signal 4. The processors of aarch64 are qemu's, which runs the program by itself.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.emulated import aarch64, machine
from tests.kernels.cpu import levels

# Processors of Bochs (`bochs --help cpu`), and of each the last level that runs.
MODELS = {
    "p4_prescott_celeron_336": "generic",
    "corei7_haswell_4770": "avx2",
    "arrow_lake": "avxvnni",
    "corei7_skylake_x": "avx2",  # has AVX-512, but no VNNI
    "corei7_icelake_u": "avx512",
    "sapphire_rapids": "avx512bf16",  # no AMX, unless Bochs is built with --enable-amx
}
CHOSEN = {"sapphire_rapids": "avx512"}  # bfloats in pairs are slower on Intel's cores
TIMEOUT_S = 3600


def missing(bochs: str, kernel: Path | None) -> list[str]:
    """What this machine lacks."""
    lacks = []
    if not shutil.which(bochs):
        lacks.append("bochs (3.0 or newer, built with --enable-x86-64 --enable-avx --enable-evex)")
    elif len(machine.find_roms(bochs)) < len(machine.ROMS):
        lacks.append("the BIOS images of bochs")
    if kernel is None or not kernel.is_file():
        lacks.append("a Linux kernel image in /boot or from --kernel")
    lacks += [tool for tool in ("grub-mkrescue", "xorriso") if not shutil.which(tool)]
    return lacks


def newest_kernel() -> Path | None:
    """The kernel in /boot that was installed last."""
    kernels = sorted(Path("/boot").glob("vmlinuz-*"), key=lambda path: path.stat().st_mtime)
    return kernels[-1] if kernels else None


def build(folder: Path) -> dict[str, Path]:
    """The files of the machine, by their paths in it."""
    program, init = levels.build(folder), folder / "init"
    levels.compile_program(init, [Path(__file__).with_name("init.cpp")], "-static")
    libraries = levels.library_folder().glob("libridgeline_cpu_*.so")
    files = {"/init": init, "/levels": program}
    files |= {f"/kernels/{path.name}": path for path in libraries}
    for path in list(files.values()):
        if path != init:
            files |= machine.shared_objects(path)
    return files


def check(model: str, level: str, lines: Iterator[str]) -> bool:
    """Read what the program prints on one processor whose last level is ``level``.

    Whether its levels were found, its own chosen, and the last passed.
    """
    start = time.monotonic()
    print(f"== {model}: {level}", flush=True)
    found = chosen = passed = False
    for line in lines:
        print(line, flush=True)
        found |= line.startswith("levels that run here:") and line.split()[-1] == level
        chosen |= line == f"level that is chosen: {CHOSEN.get(model, level)}"
        passed |= line == "ended with status 0"
    if not found:
        print(f"{level} is not the last level that detection found")
    if not chosen:
        print(f"detection did not choose {CHOSEN.get(model, level)}")
    result = "passed" if found and chosen and passed else "FAILED"
    print(f"{model}: {result}, {time.monotonic() - start:.0f} s", flush=True)
    return result == "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bochs", default="bochs", help="the emulator's program")
    parser.add_argument("--kernel", type=Path, default=newest_kernel(), help="a Linux bzImage")
    models = MODELS | aarch64.MODELS
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(models))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the machine ends too
    if unknown := set(arguments.models) - set(models):
        parser.error(f"no such processor here: {', '.join(sorted(unknown))}")
    wanted = set(arguments.models or models)
    lacks = missing(arguments.bochs, arguments.kernel) if wanted & set(MODELS) else []
    lacks += aarch64.missing() if wanted & set(aarch64.MODELS) else []
    if lacks:
        print(f"The emulated tests need {'; '.join(lacks)} (docs/cpu.md says how to get them).")
        return 2
    results = []
    if wanted & set(aarch64.MODELS):
        program, libraries = aarch64.build()
        for model, level in aarch64.MODELS.items():
            if model in wanted:
                command = [str(program), str(libraries), level]
                results.append(check(model, level, aarch64.run(model, command)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = build(folder) if wanted & set(MODELS) else {}
        for model, level in MODELS.items():
            if model in wanted:
                disc = machine.make_disc(
                    folder, arguments.kernel, files, f"/levels /kernels {level}"
                )
                lines = machine.run(arguments.bochs, model, disc, folder, TIMEOUT_S)
                results.append(check(model, level, lines))
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
