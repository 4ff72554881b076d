"""The hardware catalogue: a data file with a source and a confidence for every figure."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

import msgspec

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.spelling import nearest
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel
from ridgeline.roofline.storage import config_folder

_CONFIDENCES = ("high", "medium", "low")


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure, where it is from, and how far to trust it: high, medium or low."""

    value: float
    source: str
    confidence: str


class DeviceKind(StrEnum):
    """What a device is; ``SOC`` are CPU and GPU over one memory."""

    GPU = "gpu"
    CPU = "cpu"
    TPU = "tpu"
    ACCELERATOR = "accelerator"
    SOC = "soc"


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator or CPU. GB and TB are powers of ten; rates are dense.

    ``link_gb_per_s`` are gigabytes that one device sends in a second, one way; it is known only
    among the ``host_devices`` of one host.
    """

    name: str
    kind: DeviceKind = DeviceKind.GPU
    host_devices: int = 8
    memory_gb: Cell
    bandwidth_tbps: Cell
    tflops: dict[str, Cell]
    power_w: Cell | None = None
    usd_per_hour: Cell | None = None
    link_gb_per_s: Cell | None = None
    link_latency_us: Cell | None = None

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb.value * 1e9

    def ceilings(self) -> Ceilings:
        """The datasheet's roof, marked as not measured."""
        bandwidth = self.bandwidth_tbps.value * 1e12
        level = MemoryLevel(name="memory", size_bytes=self.memory_bytes, bytes_per_s=bandwidth)
        return Ceilings(
            name=self.name,
            levels=(level,),
            flops_per_s={name: cell.value * 1e12 for name, cell in self.tflops.items()},
            link_bytes_per_s=self.link_gb_per_s.value * 1e9 if self.link_gb_per_s else 0.0,
            link_latency_s=self.link_latency_us.value / 1e6 if self.link_latency_us else 0.0,
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    devices: dict[str, DeviceSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Devices by key, such as ``h100``, and what the names of sources mean."""

    devices: Mapping[str, DeviceSpec]
    sources: Mapping[str, str] = field(default_factory=dict)

    def device(self, key: str, *, or_this: bool = False) -> DeviceSpec:
        """The device called ``key``; ``or_this``: in its place ``this`` may be named.

        Raises:
            InvalidRequestError: there is none.
        """
        found = self.devices.get(key.lower())
        if found is None:
            known = ", ".join(sorted(self.devices))
            near = nearest(key.lower(), self.devices)
            choose = "; choose" if near is None else f"; did you mean {near}? Choose"
            if key.lower() == "this":
                choose = ", which `ridgeline ceilings` measures, is not of the catalogue; choose"
            this = " this, or" if or_this else ""
            what = "This machine" if key.lower() == "this" else f"Unknown hardware {key[:80]!r}"
            raise InvalidRequestError(f"{what}{choose}{this} one of {known}.")
        return found

    def known_as(self, machine: str) -> DeviceSpec | None:
        """The device whose key's parts all stand in the name that a machine gives itself, such as
        ``NVIDIA H100 80GB HBM3``; the longest of several keys."""
        found = [key for key in self.devices if all(_stands_in(p, machine) for p in key.split("-"))]
        return self.devices[max(found, key=len)] if found else None


def _stands_in(part: str, machine: str) -> bool:
    """Whether a word, in which letters and digits may be apart, is in a name as a whole."""
    pieces = re.findall(r"[a-z]+|[0-9]+", part)
    pattern = r"(?<![a-z0-9])" + r"[ -]?".join(pieces) + r"(?:gb)?(?![a-z0-9])"
    return re.search(pattern, machine.lower()) is not None


def load_catalogue(user_file: Path | None = None) -> Catalogue:
    """The built-in devices, and over them those of the user's own file, if there is one.

    Raises:
        InvalidRequestError: the user's file is not in the form of the built-in one.
    """
    builtin = files("ridgeline.roofline").joinpath("catalogue.toml").read_bytes()
    parts = [_parse(builtin, "the built-in catalogue")]
    path = user_file or config_folder() / "hardware.toml"
    if path.is_file():
        parts.append(_parse(path.read_bytes(), str(path)))
    elif user_file is not None:
        raise InvalidRequestError(f"{path} is not a file.")
    return Catalogue(
        devices={key: device for part in parts for key, device in part.devices.items()},
        sources={key: text for part in parts for key, text in part.sources.items()},
    )


def _parse(data: bytes, where: str) -> _File:
    try:
        values = tomllib.loads(data.decode())
        _refuse_old_names(values, where)
        parsed = msgspec.convert(values, _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    for key, device in parsed.devices.items():
        _check(device, f"{where}: {key}", parsed.sources)
    return parsed


def _refuse_old_names(values: Mapping[str, object], where: str) -> None:
    devices = values.get("devices")
    for key, device in devices.items() if isinstance(devices, Mapping) else ():
        if isinstance(device, Mapping) and "link_gbps" in device:
            raise InvalidRequestError(
                f"{where}: {key}: link_gbps is called link_gb_per_s: gigabytes (not gigabits) that "
                "one device sends in a second, one way."
            )


def _check(device: DeviceSpec, where: str, sources: Mapping[str, str]) -> None:
    cells = [getattr(device, name) for name in device.__struct_fields__]
    for cell in [*cells, *device.tflops.values()]:
        if not isinstance(cell, Cell):
            continue
        if not 0 < cell.value < 1e9:
            raise InvalidRequestError(f"{where}: {cell.value} is not a positive figure.")
        if cell.confidence not in _CONFIDENCES:
            raise InvalidRequestError(f"{where}: confidence is high, medium or low.")
        if cell.source not in sources:
            raise InvalidRequestError(f"{where}: the source {cell.source!r} is not explained.")
    if not 1 <= device.host_devices <= 1024:
        raise InvalidRequestError(f"{where}: host_devices is from 1 to 1,024.")
    if not device.tflops:
        raise InvalidRequestError(f"{where} has no rate.")
