"""The device's ceilings: those of its datasheet, and those that plain loops and libraries reach."""

import tomllib
from collections.abc import Callable
from importlib.resources import files

import torch

from ridgeline.bench.gpu.timing import measure
from ridgeline.executors.cuda.device import Device
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel

_L2_NAME = "memory"


def measured_ceilings(
    device: Device, *, matrix: int, stream_bytes: int, repeats: int
) -> tuple[Ceilings, dict[str, float]]:
    """What was reached, and the single rates: bytes per second of reading and copying (read and
    written), operations per second by number format.

    The bandwidth is that of the best loop.
    """
    at = device.torch_device
    source = torch.ones(stream_bytes // 4, dtype=torch.float32, device=at)
    target = torch.empty_like(source)
    result = torch.empty((), dtype=torch.float32, device=at)
    size = float(source.nbytes)
    loops: dict[str, tuple[float, Callable[[], object]]] = {
        "read": (size, lambda: torch.sum(source, dim=0, out=result)),
        "copy": (2 * size, lambda: target.copy_(source)),
        "add": (2 * size, lambda: torch.add(source, 1.0, out=target)),
    }
    rates = {
        name: num_bytes / measure(device, [loop], repeats=repeats)
        for name, (num_bytes, loop) in loops.items()
    }
    loops.clear()
    bandwidth = max(rates.values())
    peaks: dict[str, float] = {}
    for name, product in _products(at, matrix).items():
        peaks[name] = 2.0 * matrix**3 / measure(device, [product], repeats=repeats)
        rates[f"matmul {name}"] = peaks[name]
    level = MemoryLevel(
        name=_L2_NAME, size_bytes=float(device.memory().total), bytes_per_s=bandwidth
    )
    ceilings = Ceilings(name=device.name, levels=(level,), flops_per_s=peaks, measured=True)
    return ceilings, rates


def datasheet(name: str) -> Ceilings | None:
    """The catalogue's figures of a device by the name that its driver gives; ``None`` if it is not
    there. Of several the longest key that the name contains counts."""
    text = files("ridgeline.roofline").joinpath("catalogue.toml").read_text(encoding="utf-8")
    devices = tomllib.loads(text)["devices"]
    words = name.lower()
    key = max((key for key in devices if key in words), key=len, default=None)
    if key is None:
        return None
    device = devices[key]
    level = MemoryLevel(
        name=_L2_NAME,
        size_bytes=device["memory_gb"]["value"] * 1e9,
        bytes_per_s=device["bandwidth_tbps"]["value"] * 1e12,
    )
    return Ceilings(
        name=device["name"],
        levels=(level,),
        flops_per_s={kind: cell["value"] * 1e12 for kind, cell in device["tflops"].items()},
    )


def _products(at: torch.device, size: int) -> dict[str, Callable[[], object]]:
    """Square products by the vendor's library, by number format, where the device has them."""
    found: dict[str, Callable[[], object]] = {}
    left, right = (torch.randn(size, size, device=at).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    found["bfloat16"] = lambda: torch.mm(left, right.t(), out=out)
    if at.type == "cuda" and torch.cuda.get_device_capability(at) >= (8, 9):
        codes = [part.to(torch.float8_e4m3fn) for part in (left, right)]
        one = torch.ones((), device=at)
        found["fp8"] = lambda: torch._scaled_mm(
            codes[0], codes[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    if at.type == "cuda":
        eight = [(10 * part).to(torch.int8) for part in (left, right)]
        found["int8"] = lambda: torch._int_mm(eight[0], eight[1].t())
    return found
