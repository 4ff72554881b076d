"""Sizes of this machine's caches, as Linux tells them."""

from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Bytes of one core's L1 and L2 and of one L3, and the cores that share the L3.

    The defaults are those of a common server core, for systems that do not tell.
    """

    l1_bytes: int = 32 << 10
    l2_bytes: int = 512 << 10
    l3_bytes: int = 32 << 20
    l3_cores: int = 1


def cache_sizes(folder: Path = _SYSFS) -> CacheSizes:
    """What sysfs says; a level that it does not mention has its default."""
    found: dict[str, int] = {}
    for entry in sorted(folder.glob("index*")):
        if (entry / "type").read_text().strip() == "Instruction":
            continue
        level = int((entry / "level").read_text())
        if level > 3:
            continue
        found[f"l{level}_bytes"] = _size(entry / "size")
        if level == 3:
            found["l3_cores"] = _count(entry / "shared_cpu_list")
    return CacheSizes(**found)


def _size(path: Path) -> int:
    text = path.read_text().strip()
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def _count(path: Path) -> int:
    """Processors in a list such as ``0-7,16-23``."""
    ranges = (part.split("-") for part in path.read_text().strip().split(","))
    return sum(int(bounds[-1]) - int(bounds[0]) + 1 for bounds in ranges)
