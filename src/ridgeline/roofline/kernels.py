"""How the arithmetic of a matrix product grows with its tokens, for kernels that take a few tokens
at a time.

A kernel that loads and unpacks a weight once for a *panel* of tokens does U·⌈T / panel⌉ + P·T
instructions on a weight for T tokens, not P·T. Only the first panel's can hide behind the reading
of the weights: later panels find them in a cache.
"""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ridgeline.core.formats import FLOAT32, NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernel:
    """Vector instructions for a weight, in lanes: those of a multiply-add are 1.

    Attributes:
        family: kernels of one family share their efficiencies where one was not measured.
        unpack: to load and unpack a weight, once for each panel.
        product: for each token.
        panel_tokens: tokens that share an unpacking; ``None``: all.
        of_several: the most tokens of a panel where they do not all fit one, if that is less.
    """

    family: str
    unpack: float = 1.0
    product: float = 1.0
    panel_tokens: int | None = None
    of_several: int | None = None

    def panels(self, tokens: float) -> float:
        """Panels that ``tokens`` (a mean where it is not whole) are cut into."""
        if self.panel_tokens is None or tokens <= self.panel_tokens:
            return 1.0
        return float(ceil(tokens / (self.of_several or self.panel_tokens)))


class Kernels(Protocol):
    """The kernels of an executor, by the format of the weights."""

    @property
    def attention_rows(self) -> int:
        """Rows of queries that share a load of K or V; 0 where that is not described."""

    @property
    def lanes(self) -> NumberFormat | None:
        """The format whose peak counts instructions; ``None``: that of each product."""

    def of(self, form: NumberFormat) -> ProductKernel: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKernels:
    """Those of the cpu executor (``csrc/cpu/matmul_*.cpp``, ``dot.h``, ``attention_tiles.h``).

    Instructions are counted from the inner loops, for the 32 columns of a block.

    Attributes:
        panel_tokens: 4 with vectors of 8 floats, else 8.
        codes_of_several: tokens of a panel of codes where there are more, if less than that.
        attention_rows: of a tile of the attention kernels.
        in_16_bits: products of codes are summed in 16 bits first (no VNNI).
        in_pairs: an instruction multiplies two bfloats (AVX-512 BF16).
    """

    panel_tokens: int
    attention_rows: int
    in_16_bits: bool
    in_pairs: bool = False
    codes_of_several: int | None = None

    @property
    def lanes(self) -> NumberFormat:
        return FLOAT32

    def of(self, form: NumberFormat) -> ProductKernel:
        """The kernel of a format of weights."""
        if form.is_quantized:
            return self._of_codes(ceil(form.bits), form.group_size)
        is_pair = self.in_pairs and form.name == "bfloat16"
        return ProductKernel(
            family="float",
            unpack=1.0 if form.bits == 32 else 0.5 if is_pair else 1.5,
            product=0.5 if is_pair else 1.0,
            panel_tokens=self.panel_tokens,
        )

    def _of_codes(self, bits: int, group: int | None) -> ProductKernel:
        known = min((each for each in _UNPACK if each >= bits), default=8)
        sums = _SUMS_OF_16_BITS[known] if self.in_16_bits else 8
        columns = 64 if group is None else min(group, 128)  # between two conversions to floats
        return ProductKernel(
            family="codes",
            unpack=_UNPACK[known] / 32,
            product=(sums + 4 * 32 / columns) / 32,
            panel_tokens=self.panel_tokens,
            of_several=self.codes_of_several,
        )


# Instructions for a block of 32 columns and a vector of rows, by bits: loads, shifts and masks of
# its codes; products and sums of one token without VNNI. A conversion to floats takes four more.
_UNPACK = {4: 16, 5: 40, 6: 48, 8: 32}
_SUMS_OF_16_BITS = {4: 17, 5: 20, 6: 20, 8: 36}


@dataclass(frozen=True, slots=True)
class PlainKernels:
    """Of executors whose kernels are not described: one multiply-add for a weight and a token."""

    attention_rows: int = 0
    lanes: NumberFormat | None = None

    def of(self, form: NumberFormat) -> ProductKernel:
        """One kernel for a family."""
        return ProductKernel(family="codes" if form.is_quantized else "float")


PLAIN = PlainKernels()
