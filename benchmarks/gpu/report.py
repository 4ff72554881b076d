"""What was measured, as a table and as JSON."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ceilings import datasheet, measured_ceilings
from benchmarks.gpu.kernels import KernelTime
from benchmarks.gpu.ladder import Climbed
from benchmarks.gpu.predictions import Predictions
from benchmarks.gpu.progress import Message
from benchmarks.gpu.steps import StepTime
from benchmarks.gpu.tuned import TunedProduct
from ridgeline.core.formats import number_format
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.metrics import mbu, mfu


@dataclass(kw_only=True)
class Report:
    """Grows as things are measured; can be printed and written at any time."""

    date: datetime = field(default_factory=lambda: datetime.now(UTC))
    device: str = ""
    total_bytes: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    kernels: list[KernelTime] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    ladders: dict[str, list[Climbed]] = field(default_factory=dict)
    transformers: dict[str, float | str] = field(default_factory=dict)
    predictions: Predictions | None = None
    tuned: list[TunedProduct] = field(default_factory=list)
    computed_by: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def measured(self) -> Ceilings | None:
        """What was reached; ``None`` before the bandwidth is measured."""
        return measured_ceilings(self.device, self.rates, self.total_bytes)

    @property
    def datasheet(self) -> Ceilings | None:
        """That of the device, if it is in the catalogue."""
        return datasheet(self.device)

    def add(self, message: Message) -> None:
        """Take in what a process tells."""
        kind, what, value = message
        match kind:
            case "device":
                self.device, self.total_bytes = what, value
            case "rate":
                name, rate = value
                self.rates[name] = rate
            case "step":
                self.steps.append(value)
            case "rung":
                shape, climbed = value
                self.ladders.setdefault(shape, []).append(climbed)
            case "tuned":
                self.tuned.append(value)
            case "computed by":
                steps, kernels = value
                self.computed_by[steps] = kernels
            case "kernel":
                self.kernels.append(value)
            case "transformers":
                shape, found = value
                self.transformers[shape] = found
            case "left out":
                self.left_out.append(f"{what}: {value}")
            case "failed":
                self.failed.append(f"{what}: {value}")

    def to_json(self) -> dict[str, Any]:
        """Plain values; rates in bytes, FLOPs and tokens per second."""
        sheet = self.datasheet
        return {
            "date": self.date.isoformat(timespec="seconds"),
            "machine": self.device,
            "host": platform.node(),
            "versions": versions(),
            "seconds": round(self.seconds, 1),
            "ceilings": {
                "measured": dict(self.rates),
                "datasheet": None if sheet is None else _ceilings(sheet),
            },
            "kernels": [self._kernel(each) for each in self.kernels],
            "steps": [self._step(each) for each in self.steps],
            "ladder": [
                {
                    "shape": shape,
                    "rung": rung.name,
                    "batch": rung.batch,
                    "tokens_per_s": time.tokens_per_s,
                    "times_first": time.tokens_per_s / rungs[0].time.tokens_per_s,
                }
                for shape, rungs in self.ladders.items()
                for rung, time in rungs
            ],
            "transformers_tokens_per_s": self.transformers,
            "predictions": None if self.predictions is None else asdict(self.predictions),
            "tuned": [each.to_json() for each in self.tuned],
            "computed_by": self.computed_by,
            "left_out": self.left_out,
            "failed": self.failed,
        }

    def _kernel(self, each: KernelTime) -> dict[str, Any]:
        return {
            **asdict(each),
            "bytes_per_s": each.num_bytes / each.seconds,
            "flops_per_s": each.flops / each.seconds,
            **{
                f"mbu_{name}": mbu(each.num_bytes, each.seconds, roof.memory.bytes_per_s)
                for name, roof in self._roofs().items()
            },
        }

    def _step(self, each: StepTime) -> dict[str, Any]:
        form = number_format("fp8" if each.format == "fp8" else "bfloat16")
        moved = each.work.weight_bytes + each.work.kv_read_bytes + each.work.kv_write_bytes
        roofs = self._roofs()
        return {
            "name": each.name,
            "shape": each.shape,
            "format": each.format,
            "phase": each.phase,
            "batch": each.batch,
            "tokens": each.tokens,
            "sampled": each.sampled,
            "seconds": each.seconds,
            "wall_seconds": each.wall_seconds,
            "tokens_per_s": each.tokens_per_s,
            "moved_bytes": moved,
            "flops": each.work.flops,
            **{
                f"mbu_{name}": mbu(moved, each.wall_seconds, roof.memory.bytes_per_s)
                for name, roof in roofs.items()
            },
            **{
                f"mfu_{name}": mfu(each.work.flops, each.wall_seconds, roof.peak_flops(form))
                for name, roof in roofs.items()
                if roof.has_rate(form)
            },
        }

    def _roofs(self) -> dict[str, Ceilings]:
        roofs = {"measured": self.measured, "datasheet": self.datasheet}
        return {name: roof for name, roof in roofs.items() if roof is not None}

    def write(self, folder: Path) -> Path:
        """A file named by the time, to the second, and the machine."""
        folder.mkdir(parents=True, exist_ok=True)
        words = "-".join(self.device.lower().split())
        path = folder / f"gpu-{self.date:%Y-%m-%d-%H%M%S}-{words}.json"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
        return path

    def text(self) -> str:
        """Tables."""
        data = self.to_json()
        parts = [f"{self.device}, {data['date']}"]
        rates = [(name, _rate(name, value)) for name, value in self.rates.items()]
        sheet = self.datasheet
        if sheet is not None:
            rates.append(("datasheet: memory", _rate("read", sheet.memory.bytes_per_s)))
            for name, value in sheet.flops_per_s.items():
                rates.append((f"datasheet: {name}", _rate("matmul", value)))
        parts.append(_table(("ceiling", "rate"), rates))
        parts.append(
            _table(
                ("kernel", "µs", "GB/s", "of bandwidth", "TFLOP/s"),
                [
                    (
                        each["name"],
                        f"{1e6 * each['seconds']:.1f}",
                        f"{each['bytes_per_s'] / 1e9:.0f}",
                        _share(each, "mbu_measured"),
                        f"{each['flops_per_s'] / 1e12:.1f}",
                    )
                    for each in data["kernels"]
                ],
            )
        )
        parts.append(
            _table(
                ("step", "ms", "tokens/s", "MBU", "MFU", "MBU, datasheet", "MFU, datasheet"),
                [
                    (
                        each["name"],
                        f"{1e3 * each['wall_seconds']:.3f}",
                        f"{each['tokens_per_s']:.0f}",
                        *(
                            _share(each, f"{share}_{roof}")
                            for roof in ("measured", "datasheet")
                            for share in ("mbu", "mfu")
                        ),
                    )
                    for each in data["steps"]
                ],
            )
        )
        parts.append(
            _table(
                ("rung", "tokens/s", "× the first"),
                [
                    (
                        f"{each['shape']}: {each['rung']}",
                        f"{each['tokens_per_s']:.1f}",
                        f"{each['times_first']:.2f}",
                    )
                    for each in data["ladder"]
                ],
            )
        )
        if self.tuned:
            parts.append(
                _table(
                    ("tuned product", "µs", "guess, µs", "× the guess"),
                    [
                        (
                            f"{each.steps}: {each.product}",
                            f"{1e6 * each.found.seconds:.1f}",
                            f"{1e6 * each.found.guess_seconds:.1f}",
                            f"{each.gain:.2f}",
                        )
                        for each in self.tuned
                    ],
                )
            )
        for name, found in self.transformers.items():
            told = found if isinstance(found, str) else f"{found:.1f} tokens/s"
            parts.append(f"transformers with torch.compile, {name}, batch 1: {told}")
        if self.predictions is not None:
            parts.append(self.predictions.text())
        parts += [f"steps of {steps} by {what}" for steps, what in self.computed_by.items()]
        parts += [f"left out: {what}" for what in self.left_out]
        parts += [f"failed: {what}" for what in self.failed]
        return "\n\n".join(parts)


def versions() -> dict[str, str | None]:
    """Of what the figures depend on."""
    try:
        import triton

        found = str(triton.__version__)
    except ImportError:
        found = None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": found,
        "cuda": torch.version.cuda,
    }


def _ceilings(roof: Ceilings) -> dict[str, Any]:
    return {
        "name": roof.name,
        "bytes_per_s": roof.memory.bytes_per_s,
        "flops_per_s": dict(roof.flops_per_s),
    }


def _rate(name: str, value: float) -> str:
    return f"{value / 1e12:.1f} TFLOP/s" if name.startswith("matmul") else f"{value / 1e9:.0f} GB/s"


def _share(entry: dict[str, Any], key: str) -> str:
    return f"{entry[key]:.0%}" if key in entry else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the first to the left."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
