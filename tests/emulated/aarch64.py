"""Processors of aarch64 in qemu's emulation of a process, and kernels of a cross compiler."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.kernels.cpu import levels

ROOT = Path(__file__).parents[2]
TOOLCHAIN = ROOT / "csrc" / "aarch64.cmake"
COMPILER = "aarch64-linux-gnu-g++"
QEMU = "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", QEMU: "qemu-user-static", "cmake": "cmake"}
MODELS = {"cortex-a53": "generic", "neoverse-n1": "neondot"}  # and the last level that runs


def missing() -> list[str]:
    """What this machine lacks."""
    return [package for program, package in PACKAGES.items() if not shutil.which(program)]


def build() -> tuple[Path, Path]:
    """The program of csrc/tests, and the folder of the libraries; both in ``build/aarch64``."""
    folder = ROOT / "build" / "aarch64"
    configure = ("cmake", "-S", ROOT, "-B", folder, f"-DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}")
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(("cmake", "--build", folder, "--parallel"), check=True)
    return levels.build(folder, COMPILER), folder / "csrc" / "cpu"


def run(model: str, command: list[str]) -> Iterator[str]:
    """The lines that a program prints on an emulated processor, then how it ended."""
    with subprocess.Popen(
        [QEMU, "-L", LIBRARIES, "-cpu", model, *command], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield from (line.rstrip("\n") for line in process.stdout)
    yield f"ended with status {process.returncode}"
