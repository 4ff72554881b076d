"""Spans of time as people write them."""

import math
import re
import time

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PARTS = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|[smhd])", re.ASCII)
_WHOLE = re.compile(rf"(?:{_PARTS.pattern})+", re.ASCII)
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def parse_seconds(text: str) -> float:
    """Seconds of ``90``, ``1.5h`` or ``1h30m``; a negative number is for ever.

    Raises:
        ValueError: it is none of these.
    """
    text = text.strip()
    if _WHOLE.fullmatch(text):
        return sum(float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(text))
    if text.startswith("-") and _WHOLE.fullmatch(text[1:]):
        return math.inf
    seconds = float(text)
    if math.isnan(seconds):
        raise ValueError(text)
    return math.inf if seconds < 0 else seconds


def since_boot_s() -> float:
    """Seconds since the machine started, those that it slept included."""
    return time.clock_gettime(_SINCE_BOOT)
