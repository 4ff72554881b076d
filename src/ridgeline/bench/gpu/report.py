"""What was measured, as a table and as JSON."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench.gpu.kernels import KernelTime
from ridgeline.bench.gpu.ladder import Rung
from ridgeline.bench.gpu.predictions import Predictions
from ridgeline.bench.gpu.steps import StepTime
from ridgeline.core.formats import number_format
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.metrics import mbu, mfu


@dataclass(kw_only=True)
class Report:
    """Grows as things are measured; can be printed and written at any time."""

    device: str
    measured: Ceilings
    rates: dict[str, float]
    datasheet: Ceilings | None
    kernels: list[KernelTime] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    ladders: dict[str, list[tuple[Rung, StepTime]]] = field(default_factory=dict)
    transformers: dict[str, float | str] = field(default_factory=dict)
    predictions: Predictions | None = None
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; rates in bytes, FLOPs and tokens per second."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.device,
            "host": platform.node(),
            "versions": versions(),
            "seconds": round(self.seconds, 1),
            "ceilings": {
                "measured": dict(self.rates),
                "datasheet": None if self.datasheet is None else _ceilings(self.datasheet),
            },
            "kernels": [self._kernel(each) for each in self.kernels],
            "steps": [self._step(each) for each in self.steps],
            "ladder": [
                {
                    "shape": shape,
                    "rung": rung.name,
                    "batch": rung.batch,
                    "tokens_per_s": time.tokens_per_s,
                    "times_first": time.tokens_per_s / rungs[0][1].tokens_per_s,
                }
                for shape, rungs in self.ladders.items()
                for rung, time in rungs
            ],
            "transformers_tokens_per_s": self.transformers,
            "predictions": None if self.predictions is None else asdict(self.predictions),
            "left_out": self.left_out,
            "failed": self.failed,
        }

    def _kernel(self, each: KernelTime) -> dict[str, Any]:
        return {
            **asdict(each),
            "bytes_per_s": each.num_bytes / each.seconds,
            "flops_per_s": each.flops / each.seconds,
            "share_of_bandwidth": mbu(
                each.num_bytes, each.seconds, self.measured.memory.bytes_per_s
            ),
        }

    def _step(self, each: StepTime) -> dict[str, Any]:
        form = number_format("fp8" if each.format == "fp8" else "bfloat16")
        moved = each.work.weight_bytes + each.work.kv_read_bytes + each.work.kv_write_bytes
        roofs = {"measured": self.measured, "datasheet": self.datasheet}
        return {
            "name": each.name,
            "shape": each.shape,
            "format": each.format,
            "phase": each.phase,
            "batch": each.batch,
            "tokens": each.tokens,
            "seconds": each.seconds,
            "wall_seconds": each.wall_seconds,
            "tokens_per_s": each.tokens_per_s,
            "moved_bytes": moved,
            "flops": each.work.flops,
            **{
                f"mbu_{name}": mbu(moved, each.wall_seconds, roof.memory.bytes_per_s)
                for name, roof in roofs.items()
                if roof is not None
            },
            **{
                f"mfu_{name}": mfu(each.work.flops, each.wall_seconds, roof.peak_flops(form))
                for name, roof in roofs.items()
                if roof is not None
            },
        }

    def write(self, folder: Path) -> Path:
        """A file named by the date and the machine."""
        folder.mkdir(parents=True, exist_ok=True)
        words = "-".join(self.device.lower().split())
        path = folder / f"gpu-{datetime.now(UTC):%Y-%m-%d}-{words}.json"
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return path

    def text(self) -> str:
        """Tables."""
        data = self.to_json()
        parts = [f"{self.device}, {data['date']}"]
        rates = [(name, _rate(name, value)) for name, value in self.rates.items()]
        if self.datasheet is not None:
            level = self.datasheet.memory
            rates.append(("datasheet: memory", _rate("read", level.bytes_per_s)))
            for name, value in self.datasheet.flops_per_s.items():
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
                        f"{each['share_of_bandwidth']:.0%}",
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
                            f"{each[key]:.0%}" if key in each else "-"
                            for key in ("mbu_measured", "mfu_measured")
                        ),
                        *(
                            f"{each[key]:.0%}" if key in each else "-"
                            for key in ("mbu_datasheet", "mfu_datasheet")
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
        for name, found in self.transformers.items():
            told = found if isinstance(found, str) else f"{found:.1f} tokens/s"
            parts.append(f"transformers with torch.compile, {name}, batch 1: {told}")
        if self.predictions is not None:
            parts.append(self.predictions.text())
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
