"""Which model's replicas go on which device.

Every item takes memory and a share of a device's time (its load ÷ what the device serves within the
SLO). First-fit decreasing, or an exhaustive search where there are few items.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_EXACT_ITEMS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A replica: its bytes, and the share of a device's time that its load takes.

    ``on`` are both where a device is of another kind.
    """

    name: str
    memory_bytes: float
    time_share: float = 0.0
    on: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def size_on(self, device: "Bin") -> tuple[float, float]:
        """Bytes and share of time."""
        return self.on.get(device.kind, (self.memory_bytes, self.time_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A device that takes items."""

    name: str
    memory_bytes: float
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``bins[i]`` are the items of device i; ``left_over`` fit nowhere."""

    bins: tuple[tuple[Item, ...], ...]
    left_over: tuple[Item, ...]

    @property
    def num_used(self) -> int:
        return sum(bool(items) for items in self.bins)


def place(items: Sequence[Item], devices: Sequence[Bin]) -> Placement:
    """As many items as fit, on as few devices as it finds; exact for up to ten items.

    40 GB hold three 13B models in 8 bits, or one 34B:

    >>> gpu = Bin(name="gpu", memory_bytes=40e9)
    >>> small, large = (Item(name=n, memory_bytes=b * 1e9) for n, b in (("13B", 13), ("34B", 34)))
    >>> [item.name for item in place([small] * 4, [gpu]).bins[0]]
    ['13B', '13B', '13B']
    >>> placed = place([large, small], [gpu])
    >>> [item.name for item in placed.bins[0]], [item.name for item in placed.left_over]
    (['34B'], ['13B'])

    In 16 bits a 13B model takes 26 GB, and only one fits.
    """
    greedy = _first_fit_decreasing(items, devices)
    if len(items) <= _EXACT_ITEMS:
        return _exact(items, devices, greedy)
    return greedy


def _fits(item: Item, held: Sequence[Item], device: Bin) -> bool:
    sizes = [each.size_on(device) for each in (item, *held)]
    memory = sum(num_bytes for num_bytes, _ in sizes)
    share = sum(time_share for _, time_share in sizes)
    return memory <= device.memory_bytes and share <= 1.0 + 1e-9


def _size(item: Item, devices: Sequence[Bin]) -> float:
    largest = max((device.memory_bytes for device in devices), default=1.0)
    return max(item.memory_bytes / largest, item.time_share)


def _first_fit_decreasing(items: Sequence[Item], devices: Sequence[Bin]) -> Placement:
    bins: list[list[Item]] = [[] for _ in devices]
    left_over = []
    for item in sorted(items, key=lambda each: _size(each, devices), reverse=True):
        for held, device in zip(bins, devices, strict=True):
            if _fits(item, held, device):
                held.append(item)
                break
        else:
            left_over.append(item)
    return Placement(bins=tuple(map(tuple, bins)), left_over=tuple(left_over))


def _exact(items: Sequence[Item], devices: Sequence[Bin], start: Placement) -> Placement:
    """Depth first; most items placed, then fewest devices used. Better than ``start`` or it."""
    ordered = sorted(items, key=lambda each: _size(each, devices), reverse=True)
    best = start
    bins: list[list[Item]] = [[] for _ in devices]
    out: list[Item] = []

    def value(placement: Placement) -> tuple[int, int]:
        return len(placement.left_over), placement.num_used

    def search(index: int) -> None:
        nonlocal best
        if len(out) > len(best.left_over):
            return
        if index == len(ordered):
            found = Placement(bins=tuple(map(tuple, bins)), left_over=tuple(out))
            best = found if value(found) < value(best) else best
            return
        tried: set[tuple[str, float, tuple[Item, ...]]] = set()
        for held, device in zip(bins, devices, strict=True):
            same = (device.kind, device.memory_bytes, tuple(held))
            if same in tried or not _fits(ordered[index], held, device):
                continue
            tried.add(same)
            held.append(ordered[index])
            search(index + 1)
            held.pop()
        out.append(ordered[index])
        search(index + 1)
        out.pop()

    search(0)
    return best
