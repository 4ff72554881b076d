"""Which model is loaded next, and which ones make room for it: arithmetic, without a clock."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

_RATE_TAU_S = 600.0
_LEAST_SEEN_S = 60.0  # so that the first requests do not look like a flood
_DWELL_LOADS = 1.0  # times its loading for which a loaded model stays at the least


@dataclass(slots=True, kw_only=True)
class RequestRate:
    """Requests per second, each forgotten with a time constant of ten minutes."""

    began_s: float
    weight: float = 0.0
    last_s: float = 0.0

    def count(self, now: float) -> None:
        """There is one more request."""
        self.weight = self._weight(now) + 1.0
        self.last_s = now

    def per_second(self, now: float) -> float:
        """The rate, over what has been seen of the ten minutes, or as if that were one."""
        seen_s = max(now - self.began_s, _LEAST_SEEN_S)
        return self._weight(now) / (_RATE_TAU_S * (1.0 - math.exp(-seen_s / _RATE_TAU_S)))

    def _weight(self, now: float) -> float:
        return self.weight * math.exp((self.last_s - now) / _RATE_TAU_S)


@dataclass(slots=True, kw_only=True)
class Tenancy:
    """One model's claim to memory.

    ``num_bytes`` is what it takes while it is loaded, ``load_s`` the seconds of loading it.
    ``loaded_s``: since when it takes them, from the begin of loading to the end of its process;
    ``None`` when it does not. ``waiting`` are requests that wait for it, with their arrivals,
    oldest first; ``is_leaving``: new requests wait rather than run, and it goes once none runs.
    """

    name: str
    num_bytes: int
    load_s: float
    rate: RequestRate
    loaded_s: float | None = None
    running: int = 0
    is_leaving: bool = False
    waiting: dict[object, float] = field(default_factory=dict)

    @property
    def oldest_s(self) -> float:
        """The arrival of the request that has waited longest."""
        return next(iter(self.waiting.values()))

    def value(self, now: float) -> float:
        """Seconds of loading that a byte of it saves each second."""
        return self.rate.per_second(now) * self.load_s / max(self.num_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Load ``load`` once all of ``leave`` are out."""

    load: Tenancy
    leave: tuple[Tenancy, ...] = ()


class SwitchPolicy:
    """A cache of models in which requests may wait, so that one load serves several.

    A model that is asked for is loaded at once where there is room. Otherwise those leave that save
    the least loading for their bytes (GreedyDual-Size with frequencies, Cherkasova 1998), and only
    if more requests wait for the new one than would come for those who leave in the time of loading
    it and them again: else each switch would cost more than it gives. A model stays for as long as
    it took to load, and one with running requests is never taken away. A request that has waited
    for ``max_wait_s`` ends all that: those in its way get no new requests until it has its turn.
    """

    def __init__(self, budget_bytes: int, *, max_wait_s: float) -> None:
        self.budget_bytes = budget_bytes
        self._max_wait_s = max_wait_s

    def free_bytes(self, models: Iterable[Tenancy]) -> int:
        """What is left of the budget; below 0 where a model took more than was expected."""
        return self.budget_bytes - sum(m.num_bytes for m in models if m.loaded_s is not None)

    def next_switch(self, models: Collection[Tenancy], now: float) -> Switch | None:
        """What is to be done now; ``None`` if nothing. Marks who is to leave once it is idle."""
        for model in models:
            model.is_leaving = False
        wanted = [model for model in models if model.loaded_s is None and model.waiting]
        for model in sorted(wanted, key=lambda each: each.oldest_s):
            is_late = now - model.oldest_s >= self._max_wait_s
            leave = self._who_leaves(models, model, now, is_late=is_late)
            if leave is None or not (is_late or _pays(model, leave, now)):
                continue
            if not any(each.running for each in leave):
                return Switch(load=model, leave=tuple(leave))
            for each in leave:
                each.is_leaving = True
            return None  # the turn is the late one's
        return None

    def _who_leaves(
        self, models: Collection[Tenancy], model: Tenancy, now: float, *, is_late: bool
    ) -> list[Tenancy] | None:
        """The cheapest that make room, none where there is; ``None`` while not enough may go."""
        free, leave = self.free_bytes(models), list[Tenancy]()
        held = [(other, other.loaded_s) for other in models if other.loaded_s is not None]
        for other, loaded_s in sorted(held, key=lambda m: (m[0].running > 0, m[0].value(now))):
            if free >= model.num_bytes:
                break
            has_stayed = now - loaded_s >= (1 + _DWELL_LOADS) * other.load_s
            if is_late or (has_stayed and not other.running and not other.waiting):
                leave.append(other)
                free += other.num_bytes
        return leave if free >= model.num_bytes else None


def _pays(model: Tenancy, leave: Collection[Tenancy], now: float) -> bool:
    lost = sum(each.rate.per_second(now) * (each.load_s + model.load_s) for each in leave)
    return len(model.waiting) >= lost
