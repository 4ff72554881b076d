"""How the attention of a model is converted: the settings of `convert`."""

from dataclasses import dataclass

from ridgeline.core.errors import SettingsError

METHODS = ("aligned", "principal", "mean", "first")  # of `merging.merge`


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRecipe:
    """Settings of a conversion; at least one of kv_heads, window and share is given.

    Attributes:
        kv_heads: KV heads of each layer, a divisor of those that it has: several become one, which
            their query heads share.
        window: positions that a token sees, itself included.
        full_every: with window, each so many-th layer still sees all before it, as the last of 6 in
            Gemma 3; 0 for none.
        share: so many layers in a row have one K and V, those of the first.
        merge: how heads become one: "principal" the combination from which they are restored best;
            "aligned" the mean once they are rotated to each other; "mean" and "first" to compare.
        window_tokens: length of a calibration sequence.
        num_windows: how many of them there are at most.
        seed: of the choice of calibration sequences.

    Raises:
        SettingsError: a setting is out of bounds, or has no effect.
    """

    kv_heads: int = 0
    window: int = 0
    full_every: int = 0
    share: int = 1
    merge: str = "principal"
    window_tokens: int = 512
    num_windows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("kv_heads", self.kv_heads, 0, 1 << 20),
            ("window", self.window, 0, 1 << 31),
            ("full_every", self.full_every, 0, 1 << 20),
            ("share", self.share, 1, 1 << 20),
            ("window_tokens", self.window_tokens, 2, 1 << 20),
            ("num_windows", self.num_windows, 1, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
        ):
            if not least <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be from {least} to {most}.")
        if self.merge not in METHODS:
            raise SettingsError(f"There is no merge {self.merge!r}; choose one of {METHODS}.")
        if self.full_every and (not self.window or self.full_every == 1):
            raise SettingsError("full_every goes with `window`, and is 2 or more.")
        if not (self.kv_heads or self.window or self.share > 1):
            raise SettingsError(
                "Nothing is converted: kv_heads and `window` from 1 on, and `share` from 2 on, do."
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether K and V change."""
        return bool(self.kv_heads) or self.share > 1
