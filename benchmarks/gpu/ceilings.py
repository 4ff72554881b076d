"""The device's ceilings: those of its datasheet, and those that plain loops and libraries reach."""

import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.resources import files

import torch

from benchmarks.gpu.progress import Bench
from benchmarks.gpu.timing import measure
from ridgeline.kernels.gpu import has_fp8
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel

_MEMORY = "memory"
_LOOPS = ("read", "copy", "add")
_PRODUCT = "matmul "
FAST_FP8 = "fp8, fast accumulation"

Call = Callable[[], object]


def bench_ceilings(bench: Bench) -> None:
    """Single rates: bytes per second of reading and copying (read and written), operations per
    second by number format.

    fp8 is as `kernels.triton.scaled_matmul` has it, which adds up in float32. With fast
    accumulation fewer bits are kept; the executor never asks for that.
    """
    at, settings = bench.device.torch_device, bench.settings

    def rate(name: str, amount: float, make: Callable[[], Call]) -> None:
        if bench.progress.allows(f"ceiling: {name}"):
            with bench.device.scope(), torch.inference_mode():
                seconds = measure(bench.device, [make()], settings)
            bench.progress.result("rate", (name, amount / seconds))

    size = float(settings.stream_bytes // 4 * 4)
    for name in _LOOPS:
        rate(name, size if name == "read" else 2 * size, partial(_loop, name, at, size))
    operations = 2.0 * settings.matrix**3
    for name, make in _products(at).items():
        rate(_PRODUCT + name, operations, partial(make, settings.matrix))


def measured_ceilings(name: str, rates: Mapping[str, float], total: float) -> Ceilings | None:
    """What was reached, by the best of the loops; ``None`` if none of them ran."""
    loops = [rates[loop] for loop in _LOOPS if loop in rates]
    if not loops:
        return None
    level = MemoryLevel(name=_MEMORY, size_bytes=total, bytes_per_s=max(loops))
    peaks = {
        key.removeprefix(_PRODUCT): value
        for key, value in rates.items()
        if key.startswith(_PRODUCT) and key != _PRODUCT + FAST_FP8
    }
    return Ceilings(name=name, levels=(level,), flops_per_s=peaks, measured=True)


@cache
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
        name=_MEMORY,
        size_bytes=device["memory_gb"]["value"] * 1e9,
        bytes_per_s=device["bandwidth_tbps"]["value"] * 1e12,
    )
    return Ceilings(
        name=device["name"],
        levels=(level,),
        flops_per_s={kind: cell["value"] * 1e12 for kind, cell in device["tflops"].items()},
    )


def _loop(name: str, at: torch.device, size: float) -> Call:
    source = torch.ones(int(size) // 4, dtype=torch.float32, device=at)
    if name == "read":
        result = torch.empty((), dtype=torch.float32, device=at)
        return lambda: torch.sum(source, dim=0, out=result)
    target = torch.empty_like(source)
    if name == "copy":
        return lambda: target.copy_(source)
    return lambda: torch.add(source, 1.0, out=target)


def _products(at: torch.device) -> dict[str, Callable[[int], Call]]:
    """What makes square products by the vendor's library, by the formats that the device has."""

    def pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, size, device=at), torch.randn(size, size, device=at)

    def plain(size: int) -> Call:
        left, right = (part.bfloat16() for part in pair(size))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right.t(), out=out)

    def scaled(size: int, fast: bool) -> Call:
        left, right = (part.to(torch.float8_e4m3fn) for part in pair(size))
        one = torch.ones((), device=at)
        return lambda: torch._scaled_mm(
            left,
            right.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    def integers(size: int) -> Call:
        left, right = ((10 * part).to(torch.int8) for part in pair(size))
        return lambda: torch._int_mm(left, right.t())

    found: dict[str, Callable[[int], Call]] = {"bfloat16": plain}
    if at.type == "cuda" and has_fp8():
        found["fp8"] = lambda size: scaled(size, False)
        found[FAST_FP8] = lambda size: scaled(size, True)
    if at.type == "cuda":
        found["int8"] = integers
    return found
