"""What is to be made of a model: the settings of `quantize`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ridgeline.core.errors import SettingsError
from ridgeline.core.gguf_file_types import FILE_TYPES

if TYPE_CHECKING:
    from ridgeline.compress.grids import Grid

EMBEDDED = "embedded"  # the calibration text that comes with the package
METHODS = ("gptq", "awq", "smoothquant", "rtn")
FORMATS = ("compressed-tensors", "gptq", "gguf")
_GPTQ_BITS = (2, 3, 4, 8)
_BITS = 4
_FACTORED_GROUP, _MOST_FACTORED_BITS = 32, 4
_SCALE_BITS = 16


class WindowChoice(Protocol):
    """Which windows of a calibration text are used."""

    @property
    def window_tokens(self) -> int:
        """Length of a window."""
        ...

    @property
    def num_windows(self) -> int:
        """How many there are at most."""
        ...

    @property
    def seed(self) -> int:
        """Of the choice of windows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Settings of a quantization.

    Attributes:
        method: "gptq" rounds so that the layers' outputs change least; "rtn" to the nearest; "awq"
            and "smoothquant" likewise, once scales are folded into the norms, the one for fewer
            bits, the other for 8 bits with activations of 8 bits (``bits`` 8, ``group_size`` 0).
        bits: of a weight, 2 to 8.
        bits_per_weight: instead, of the layers' matrices on average with their scales, such as 5:
            each has 4, 5, 6 or 8, more where rounding is predicted to change the output more, and
            2 or 3 as well where the average is below that of 4.
        group_size: columns that share a scale; 0 for whole rows. Up to 4 bits, symmetric groups of
            32 are Ridgeline's own format, which the cpu executor runs at 1/8 bit less.
        symmetric: without zero points.
        format: of the file: "compressed-tensors", "gptq" or "gguf".
        gguf_type: of a GGUF file, whose tensors have the bits that its mix gives them: q4_k_m, q4_0
            and so on, as `ridgeline convert` has them.
        window_tokens: length of a calibration sequence.
        num_windows: how many of them there are at most.
        seed: of the choice of windows.
        keep_zeros: leave weights that are zero so, as after `ridgeline prune`.
        tune: steps in which the codes of a layer are tuned together after GPTQ, such as 200.

    Raises:
        SettingsError: a setting is out of bounds, or does not go with another.
    """

    method: str = "gptq"
    bits: int = _BITS
    bits_per_weight: float | None = None
    group_size: int = 32
    symmetric: bool = True
    format: str = "compressed-tensors"
    gguf_type: str = "q4_k_m"
    window_tokens: int = 512
    num_windows: int = 128
    seed: int = 0
    keep_zeros: bool = False
    tune: int = 0

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("format", self.format, FORMATS)
        _check_choice("gguf_type", self.gguf_type, tuple(FILE_TYPES))
        if self.format == "gguf" and (self.bits, self.group_size, self.symmetric) != (4, 32, True):
            raise SettingsError("bits and groups of a GGUF file are those of gguf_type.")
        if self.format == "gguf" and self.keep_zeros:
            raise SettingsError("Blocks of GGUF files may have no zero: keep_zeros is for others.")
        if self.format == "gguf" and self.method not in ("gptq", "rtn"):
            raise SettingsError(f"GGUF files are made by gptq or rtn, and not by {self.method}.")
        for name, value, least, most in (
            ("bits", self.bits, 2, 8),
            ("group_size", self.group_size, 0, 1 << 20),
            ("window_tokens", self.window_tokens, 2, 1 << 20),
            ("num_windows", self.num_windows, 1, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("tune", self.tune, 0, 1 << 20),
        ):
            if not least <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be from {least} to {most}.")
        if self.format == "gptq" and self.bits not in _GPTQ_BITS:
            raise SettingsError(
                f"The format gptq has no {self.bits} bits; it has 2, 3, 4 and 8. "
                "compressed-tensors has all from 2 to 8."
            )
        if self.tune and (self.method != "gptq" or self.keep_zeros):
            raise SettingsError("tune is for `method` gptq, and without keep_zeros.")
        if self.bits_per_weight is not None:
            self._check_mixed()
        is_smooth = self.method == "smoothquant"
        if is_smooth and (self.bits, self.group_size, self.symmetric) != (8, 0, True):
            raise SettingsError(
                "smoothquant is for 8 bits, weights and activations: --bits 8 --group-size 0."
            )
        if is_smooth and self.format != "compressed-tensors":
            raise SettingsError("Only compressed-tensors says that activations are rounded, too.")

    def _check_mixed(self) -> None:
        assert self.bits_per_weight is not None
        if not 2 <= self.bits_per_weight <= 16:
            raise SettingsError(
                f"bits_per_weight is {self.bits_per_weight:g}; it must be from 2 to 16."
            )
        if self.format != "compressed-tensors" or self.method != "gptq":
            raise SettingsError(
                "bits_per_weight is for `method` gptq in the format compressed-tensors; GGUF files "
                "have the mixes of gguf_type."
            )
        if self.bits != _BITS or not self.group_size:
            raise SettingsError("bits_per_weight goes with groups, and not with `bits`.")

    @property
    def choices(self) -> tuple[int, ...]:
        """The bits that matrices may have."""
        if self.bits_per_weight is None:
            return (self.bits,)
        return (2, 3, 4, 5, 6, 8) if self.bits_per_weight < self.stored_bits(4) else (4, 5, 6, 8)

    def stored_bits(self, bits: int) -> float:
        """What a weight of so many bits takes with its part of scales and zero points."""
        zero = 0 if self.symmetric else bits
        return bits + (_SCALE_BITS + zero) / self.group_size if self.group_size else bits

    @property
    def is_factored(self) -> bool:
        """Whether scales are Ridgeline's own, which its kernels of few bits compute with."""
        is_own = self.symmetric and self.group_size == _FACTORED_GROUP
        return is_own and self.bits <= _MOST_FACTORED_BITS and self.format != "gguf"

    @property
    def is_smoothed(self) -> bool:
        """Whether scales are folded into norms before."""
        return self.method in ("awq", "smoothquant")

    @property
    def rounds_activations(self) -> bool:
        """Whether the file asks for activations of 8 bits."""
        return self.method == "smoothquant"

    @property
    def is_calibrated(self) -> bool:
        """Whether the method looks at what the model computes."""
        return self.method != "rtn"

    def grid(self, columns: int, bits: int | None = None) -> "Grid | None":
        """The grid of rows of so many columns, unless they are no whole groups, which other readers
        insist on; ``bits`` other than the recipe's."""
        from ridgeline.compress.grids import FactoredIntegers, Integers  # which bring torch

        if self.group_size and columns % self.group_size:
            return None
        bits = self.bits if bits is None else bits
        if self.is_factored and bits <= _MOST_FACTORED_BITS:
            return FactoredIntegers(bits=bits)
        size = self.group_size or columns
        return Integers(bits=bits, group_size=size, symmetric=self.symmetric)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"There is no {name} {value!r}; choose one of {', '.join(choices)}.")
