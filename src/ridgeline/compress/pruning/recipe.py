"""What is to be taken away of a model: the settings of `prune`."""

import re
from dataclasses import dataclass

from ridgeline.core.errors import SettingsError

METHODS = ("sparsegpt", "wanda", "magnitude", "random")
UNSTRUCTURED = "unstructured"
_PATTERN = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRecipe:
    """Settings of a pruning: zeros in every matrix of the layers, or a smaller model.

    Attributes:
        method: which weights go: "sparsegpt" those that change the outputs of their matrix least,
            the others making good for them; "wanda" the least weight times norm of input of each
            row; "magnitude" the least weights of each matrix; "random" any, to compare with.
        sparsity: share of the weights that become zero.
        pattern: "unstructured", or N:M for at most N weights other than zero of M in a row, and
            then sparsity is 1 - N/M.
        remove_layers: how many layers go: those that change the residual stream least.
        remove_kv_heads: how many KV heads of each layer go, with the query heads that share them.
        remove_ffn: share of the feed-forward channels of each layer that go; a width that is a
            multiple of 32 stays one.
        window_tokens: length of a calibration sequence.
        num_windows: how many of them there are at most.
        seed: of the choice of windows, and of random.

    Raises:
        SettingsError: a setting is out of bounds, or does not go with another.
    """

    method: str = "sparsegpt"
    sparsity: float = 0.5
    pattern: str = UNSTRUCTURED
    remove_layers: int = 0
    remove_kv_heads: int = 0
    remove_ffn: float = 0.0
    window_tokens: int = 512
    num_windows: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SettingsError(
                f"There is no method {self.method!r}; choose one of {', '.join(METHODS)}."
            )
        for name, share in (("sparsity", self.sparsity), ("remove_ffn", self.remove_ffn)):
            if not 0 <= share < 1:
                raise SettingsError(f"{name} is {share}; it must be at least 0 and below 1.")
        for name, value, least, most in (
            ("remove_layers", self.remove_layers, 0, 1 << 20),
            ("remove_kv_heads", self.remove_kv_heads, 0, 1 << 20),
            ("window_tokens", self.window_tokens, 2, 1 << 20),
            ("num_windows", self.num_windows, 1, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
        ):
            if not least <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be from {least} to {most}.")
        if self.pattern != UNSTRUCTURED:
            kept, of = self.group
            if kept >= of:
                raise SettingsError(f"The pattern {self.pattern} takes nothing away.")
        if self.is_structured and self.method not in ("sparsegpt", "random"):
            raise SettingsError(
                f"Heads, channels and layers are chosen by what their removal does to the outputs, "
                f"or at random, and not by {self.method}."
            )

    @property
    def is_structured(self) -> bool:
        """Whether the result is a smaller model, instead of zeros in one of the same size."""
        return bool(self.remove_layers or self.remove_kv_heads or self.remove_ffn)

    @property
    def group(self) -> tuple[int, int]:
        """N and M of the pattern N:M."""
        found = _PATTERN.fullmatch(self.pattern)
        if found is None:
            raise SettingsError(
                f"There is no pattern {self.pattern!r}; it is unstructured, or N:M such as 2:4."
            )
        return int(found[1]), int(found[2])

    @property
    def is_calibrated(self) -> bool:
        """Whether the method looks at what the model computes."""
        return self.is_structured or self.method in ("sparsegpt", "wanda")
