"""The C++ program that compares instruction-set levels (csrc/tests), and the libraries it loads."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import ridgeline.kernels.cpu

SOURCES = Path(__file__).parents[3] / "csrc" / "tests"


def library_folder() -> Path:
    """Where the installed libraries are."""
    return next(
        Path(folder)
        for folder in ridgeline.kernels.cpu.__path__
        if (Path(folder) / "libridgeline_cpu_detect.so").is_file()
    )


def compile_program(
    program: Path, sources: Iterable[Path], *flags: str, compiler: str | None = None
) -> None:
    """Compile and link C++ sources.

    Raises:
        AssertionError: there is no compiler, though the kernels were built here.
    """
    names = [compiler] if compiler else ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    assert compiler, "the kernels are built with a C++ compiler"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-o", program, *sources, *flags]
    subprocess.run(command, check=True)


def build(folder: Path, compiler: str | None = None) -> Path:
    """The program, compiled into ``folder``; of shared libraries it needs only the C library."""
    program = folder / "levels"
    static = ("-static-libstdc++", "-static-libgcc")
    flags = (*static, "-ldl", "-pthread")
    compile_program(program, sorted(SOURCES.glob("*.cpp")), *flags, compiler=compiler)
    return program
