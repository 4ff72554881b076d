"""``ridgeline collect-env``: what this machine and installation are, for bug reports."""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.display import output_console
from ridgeline.cli.options import Parser
from ridgeline.core.errors import RidgelineError
from ridgeline.core.host import available_memory_bytes, cpu_name, usable_cores
from ridgeline.core.parts import list_parts

PACKAGES = (
    "ridgeline", "torch", "numpy", "tokenizers", "safetensors", "huggingface_hub",
    "transformers", "triton", "msgspec", "jinja2",
)  # fmt: skip
ISA_FLAGS = (
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16",
    "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the facts as a table, or as JSON."""
    facts = collect()
    if arguments.json:
        print(json.dumps(facts))
        return 0
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if isinstance(value, dict):
            value = "\n".join(f"{key} {entry}" for key, entry in value.items())
        elif isinstance(value, list):
            value = " ".join(value)
        table.add_row(name, escape(str(value)))
    output_console().print(table)
    return 0


def collect() -> dict[str, Any]:
    """Facts by name; sizes in bytes."""
    from ridgeline.executors import executor_names, executor_traits
    from ridgeline.executors.cpu.native_ops import ops_without_kernel
    from ridgeline.kernels.cpu.library import (
        available_levels,
        native_kernels_run,
        native_level,
    )
    from ridgeline.models import model_types

    facts: dict[str, Callable[[], Any]] = {
        "python": lambda: sys.version.split()[0],
        "platform": platform.platform,
        "packages": lambda: {name: _version(name) for name in PACKAGES},
        "cpu": cpu_name,
        "cores": usable_cores,
        "isa": _isa_flags,
        "cpu_level": native_level,
        "cpu_levels": lambda: list(available_levels()) if native_kernels_run() else [],
        "cpu_ops_by_reference": lambda: list(ops_without_kernel()),
        "memory_bytes": lambda: psutil.virtual_memory().total,
        "available_bytes": available_memory_bytes,
        "gpus": _gpus,
        "executors": lambda: {
            name: executor_traits(name).missing() or "runs" for name in executor_names()
        },
        "flash_attention": _flash_attention,
        "step_seconds": _step_seconds,
        "model_types": lambda: list(model_types()),
        "parts": list_parts,
    }
    return {name: _answer(fact) for name, fact in facts.items()}


def _answer(fact: Callable[[], Any]) -> Any:
    """The fact, or the sentence that says why there is none: bug reports need the others."""
    try:
        return fact()
    except ModuleNotFoundError as error:
        return f"needs {error.name}"
    except (RidgelineError, OSError) as error:
        return str(error)


def _flash_attention() -> Any:
    from ridgeline.kernels.flash_attention import flash_attention_versions

    return flash_attention_versions()


def _step_seconds() -> str:
    """What the scheduler predicts the seconds of steps with."""
    from ridgeline.executors import default_executor
    from ridgeline.kernels.cpu.library import native_level
    from ridgeline.roofline.calibration import (
        calibration_path,
        describe,
        load,
        measured_elsewhere,
    )

    found = load(calibration_path(default_executor()))
    return (measured_elsewhere(found, native_level()) if found else None) or describe(found)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _isa_flags() -> list[str]:
    info = _cpuinfo()
    present = set((info.get("flags") or info.get("Features") or "").split())
    return [flag for flag in ISA_FLAGS if flag in present]


def _gpus() -> list[str]:
    from ridgeline.executors.traits import has_torch

    if not has_torch():
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
