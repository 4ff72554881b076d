"""Configurations of products, timed on load at the shapes that a model's steps have.

The search changes one respect of a configuration at a time, and keeps what is faster: the tile, how
often columns are split, how many are read in a step, how many steps are on their way. Most of its
time is the compiler's. What the time does not suffice for is gone on with at the next start.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.timing import Timer, seconds_on
from ridgeline.executors.cuda.tuning_cache import Tuned, TuningCache
from ridgeline.kernels.triton import (
    NUM_AXES,
    LinearConfig,
    LinearConfigs,
    LinearKey,
    LinearUse,
    batch_class,
    cannot_be_compiled,
    neighbours,
)

_log = logging.getLogger(__name__)

_WARM_UP = 2  # times that what is known is timed: clocks rise with work
_WORTH = 1.02  # a configuration that is hardly faster is noise
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times what is not known yet, for up to ``most_s`` seconds a model, and one compilation.

    Attributes:
        most_s: 0 times nothing: `load` is all there is to do.
        timer, clock: of the device, and of the host.
    """

    cache: TuningCache
    most_s: float = 20.0
    timer: Timer = seconds_on
    clock: Callable[[], float] = time.monotonic

    def load(self, device: Device, configs: LinearConfigs) -> dict[LinearKey, Tuned]:
        """Have ``configs`` know what was timed before; what that is."""
        known = self.cache.read(device.name)
        for key, tuned in known.items():
            configs.add(key, tuned.config)
        return known

    def run(
        self, device: Device, configs: LinearConfigs, uses: Mapping[LinearKey, LinearUse]
    ) -> dict[LinearKey, Tuned]:
        """Have ``configs`` know the best for some uses, those of small batches and then those of
        the largest matrices first; what is known now, by use. Not within a capture."""
        began = self.clock()
        known = self.load(device, configs)
        found: dict[LinearKey, Tuned] = {}
        timed = 0
        for key, use in sorted(uses.items(), key=_order):
            tuned = known.get(key)
            if (tuned is None or not tuned.is_complete) and self.clock() - began < self.most_s:
                try:
                    tuned = self._searched(device, use, tuned, began + self.most_s)
                except torch.OutOfMemoryError:
                    _log.warning("There is no memory left to time products of %s.", key.name)
                except Exception as error:
                    if not cannot_be_compiled(error):
                        raise
                    _log.warning("Products of %s are not timed: %s", key.name, error)
                else:
                    known[key] = tuned
                    configs.add(key, tuned.config)
                    timed += 1
            if tuned is not None:
                found[key] = tuned
        if not uses:
            return found
        if timed:
            self.cache.write(device.name, known)
        done = sum(tuned.is_complete for tuned in found.values())
        _log.info(
            "Products of %d of %d shapes are tuned; %.1f s went into %d of them%s.",
            done,
            len(uses),
            self.clock() - began,
            timed,
            "" if done == len(uses) else ", and the next start goes on",
        )
        return found

    def _searched(
        self, device: Device, use: LinearUse, tuned: Tuned | None, ends_at: float
    ) -> Tuned:
        """The search, from where it ended, until it is done or the time is over."""
        runner = use.runner()
        guess = use.guess()
        expected = [result.clone() for result in runner.results(guess)]

        def seconds(config: LinearConfig) -> float:
            took = self.timer(device, lambda: runner.run(config), recorded=True)
            return took / len(runner.calls)

        def trial(config: LinearConfig) -> float:
            """Seconds; infinite for what cannot be compiled, or computes something else. An error
            of the device is one: nothing runs after it."""
            try:
                pairs = zip(runner.results(config), expected, strict=True)
                agree = all(_agree(found, wanted) for found, wanted in pairs)
                took = seconds(config) if agree else float("inf")
                device.synchronize()
            except Exception as error:
                if not cannot_be_compiled(error):
                    raise
                _log.debug("A product cannot have %s: %s", config, error)
                return float("inf")
            if not agree:
                _log.warning("A product with %s is not that of others; it is not used.", config)
            return took

        known = guess if tuned is None else tuned.config
        first = min(seconds(known) for _ in range(_WARM_UP))
        if tuned is None:
            tuned = Tuned(config=guess, seconds=first, guess_seconds=first, axes=0)
        tuned = replace(tuned, seconds=first)
        for axis in range(tuned.axes, NUM_AXES):
            best = tuned
            for config in neighbours(use, tuned.config, axis):
                if self.clock() >= ends_at:
                    return replace(best, axes=axis)
                took = trial(config)
                if took * _WORTH < best.seconds:
                    best = replace(best, config=config, seconds=took)
            tuned = replace(best, axes=axis + 1)
        return tuned


def representatives(rows: Iterable[int]) -> tuple[int, ...]:
    """Of the batches that steps are recorded for, one for each class of `batch_class`."""
    found: dict[int, int] = {}
    for count in sorted(rows):
        of = batch_class(count)
        if count <= of or of not in found:
            found[of] = count
    return tuple(found.values())


def _order(item: tuple[LinearKey, LinearUse]) -> tuple[int, int, str]:
    key, use = item
    return (key.tokens, -use.num_bytes, key.name)


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two products differ by rounding alone, in every element: one tile of many that is
    wrong is hardly seen in a norm."""
    found, wanted = found.float(), expected.float()
    usual = wanted.square().mean(dim=-1, keepdim=True).sqrt()  # of a token's outputs
    allowed = _TOLERANCES[expected.dtype] * (wanted.abs() + usual)
    return bool(((found - wanted).abs() <= allowed).all())
