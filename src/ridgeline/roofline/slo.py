"""Limits of latency that a good request keeps."""

from dataclasses import dataclass

from ridgeline.core.errors import InvalidRequestError

SLO_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "end_to_end_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits in seconds; a request that misses one of them is not good. ``None``: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    end_to_end_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set, by what they are called on the command line."""
        named = {name: getattr(self, field) for name, field in SLO_NAMES.items()}
        return {name: limit for name, limit in named.items() if limit is not None}

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return bool(self.limits)

    def missed(
        self, *, ttft_s: float, tpot_s: float | None, end_to_end_s: float
    ) -> tuple[str, ...]:
        """Names of the limits that a request misses; one of one token has no TPOT."""
        got = {"ttft": ttft_s, "tpot": tpot_s or 0.0, "e2e": end_to_end_s}
        return tuple(name for name, limit in self.limits.items() if got[name] > limit)

    def met(self, *, ttft_s: float, tpot_s: float | None, end_to_end_s: float) -> bool:
        return not self.missed(ttft_s=ttft_s, tpot_s=tpot_s, end_to_end_s=end_to_end_s)

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} {1e3 * s:g} ms" for name, s in self.limits.items())


# Of people who watch an answer appear: at once, and as fast as a very fast reader reads.
PRESETS = {"chat": Slo(ttft_s=0.2, tpot_s=0.12)}


def parse_slo(text: str) -> Slo:
    """A preset, or limits in seconds, as the command line and settings have them.

    >>> parse_slo("chat") == parse_slo("ttft=0.2,tpot=0.12")
    True

    Raises:
        InvalidRequestError: it is neither.
    """
    if text in PRESETS:
        return PRESETS[text]
    fields = dict(SLO_NAMES)
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        field = fields.pop(name.strip(), None)
        if field is None or not 0 < seconds < 1e6:
            raise InvalidRequestError(
                "--slo is written in seconds: ttft=0.5,tpot=0.05,e2e=10; or it is the name of a "
                f"preset: {', '.join(PRESETS)}."
            )
        values[field] = seconds
    return Slo(**values)
