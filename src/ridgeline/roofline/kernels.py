"""How the arithmetic of a matrix product grows with its tokens, for kernels that take a few tokens
at a time.

A kernel that loads and unpacks a weight once for a *panel* of tokens does U·⌈T / panel⌉ + P·T
instructions on a weight for T tokens, not P·T. Only the first panel's can hide behind the reading
of the weights: later panels find them in a cache.
"""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np

from ridgeline.core.formats import FLOAT32, NumberFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernel:
    """Vector instructions for a weight, in lanes: those of a multiply-add are 1.

    Attributes:
        family: kernels of one family share their efficiencies where one was not measured.
        unpack: to load and unpack a weight, once for each panel.
        product: for each token.
        panel_tokens: tokens that share an unpacking; ``None``: all.
        tile_tokens: what is computed is a multiple of so many.
    """

    family: str
    unpack: float = 1.0
    product: float = 1.0
    panel_tokens: int | None = None
    tile_tokens: int = 1

    def computed(self, tokens: float) -> float:
        """Tokens that are multiplied for ``tokens`` (a mean where it is not whole): on average half
        a tile is padding."""
        return max(float(self.tile_tokens), tokens + (self.tile_tokens - 1) / 2)

    def panels(self, tokens: float) -> float:
        """Panels that ``tokens`` are cut into."""
        if self.panel_tokens is None or tokens <= self.panel_tokens:
            return 1.0
        return float(ceil(tokens / self.panel_tokens))

    def expert_panels(self, num_tokens: int, share: float) -> float:
        """Mean panels of an expert that is met at all, if each of ``num_tokens`` tokens goes to it
        with a probability of ``share``: more than those of the mean of its tokens."""
        if self.panel_tokens is None or share >= 1.0 or num_tokens <= self.panel_tokens:
            return self.panels(num_tokens)
        counts = np.arange(1, num_tokens + 1)
        # Binomial: P(n) / P(n - 1) is (T - n + 1) / n · share / (1 - share).
        ratios = (num_tokens + 1 - counts) / counts * share / (1 - share)
        logs = np.cumsum(np.log(ratios))
        weights = np.exp(logs - logs.max())
        panels = np.ceil(counts / self.panel_tokens)
        return float(panels @ weights / weights.sum())


class KernelModel(Protocol):
    """The kernels of an executor, by the format of the weights."""

    @property
    def attention_rows(self) -> int:
        """Rows of queries that share a load of K or V; 0 where that is not described."""

    @property
    def lanes(self) -> NumberFormat | None:
        """The format whose peak counts instructions; ``None``: that of each product."""

    @property
    def expert_ops(self) -> int:
        """Ops that run for each expert that is met; 0 where all experts are one."""

    def of(self, form: NumberFormat, *, tokens: float, of_experts: bool = False) -> ProductKernel:
        """The kernel for weights of a format and so many tokens (a mean where they are not whole).

        ``of_experts``: for those of a mixture's experts, of which each is multiplied with few.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeKernels:
    """Those of the cpu executor (``csrc/cpu/matmul_*.cpp``, ``dot.h``, ``attention_tiles.h``).

    Instructions are counted from the inner loops, for the 32 columns of a block.

    Attributes:
        panel_tokens: 4 with vectors of 8 floats, else 8 (6 of long prompts in some formats).
        attention_rows: of a tile of the attention kernels.
        in_16_bits: products of codes are summed in 16 bits first (no VNNI).
        in_pairs: an instruction multiplies two bfloats (AVX-512 BF16).
        has_amx: bfloats, and codes of more tokens than a panel, are multiplied by tiles.
        line: what loading a line of codes takes, in instructions. Panels after the first find them
            in the second-level cache, which gives a line of 64 bytes in the time of about 4, and
            one of 32 in that of 1.
    """

    panel_tokens: int
    attention_rows: int
    in_16_bits: bool
    in_pairs: bool = False
    has_amx: bool = False
    line: float = 1.0

    @property
    def lanes(self) -> NumberFormat:
        return FLOAT32

    @property
    def expert_ops(self) -> int:
        """Its rows are gathered, go through its network, and are added."""
        return 3

    def of(self, form: NumberFormat, *, tokens: float, of_experts: bool = False) -> ProductKernel:
        """The kernel of a format of weights; experts have the same."""
        if self.has_amx and form.name == "bfloat16":
            return _BFLOATS_BY_AMX
        if form.is_quantized:
            of_tiles = self.has_amx and tokens > self.panel_tokens
            return self._codes_by_amx(form) if of_tiles else self._of_codes(form)
        is_pair = self.in_pairs and form.name == "bfloat16"
        return ProductKernel(
            family="float",
            unpack=1.0 if form.bits == 32 else 0.5 if is_pair else 1.5,
            product=0.5 if is_pair else 1.0,
            panel_tokens=self.panel_tokens,
        )

    def _of_codes(self, form: NumberFormat) -> ProductKernel:
        bits = _packed_bits(form)
        sums = _SUMS_OF_16_BITS[bits] if self.in_16_bits else 8
        split = _SPLIT_FOR_16_BITS if self.in_16_bits and bits == 8 else _SPLIT[bits]
        # In 16 bits factors take the place of the ones that sums are multiplied with.
        factors = bool(form.factor_columns) and not self.in_16_bits
        return ProductKernel(
            family="codes",
            unpack=(bits * self.line + split) / 32,
            product=(sums + factors + 4 * 32 / _step_columns(form)) / 32,
            panel_tokens=self.panel_tokens,
        )

    def _codes_by_amx(self, form: NumberFormat) -> ProductKernel:
        """Codes become bytes once for all tokens; sums of a token are stored, loaded, converted and
        multiplied twice at each step."""
        bits, columns = _packed_bits(form), _step_columns(form)
        split = _SPLIT[bits] + 16 + _FACTORS * bool(form.factor_columns)
        tiles = max(columns / _TILE_BYTES, 1)
        return ProductKernel(
            family="tiles",
            unpack=(bits * self.line + split) / 32,
            product=(_TILE_PRODUCT / _TILE_TOKENS * tiles + 5) / columns,
        )


def _packed_bits(form: NumberFormat) -> int:
    return min((each for each in _SPLIT if each >= form.bits), default=8)


def _step_columns(form: NumberFormat) -> int:
    """Columns between two conversions to floats."""
    return 64 if form.group_size is None else min(form.group_size, 128)


# Instructions for a block of 32 columns and a vector of rows, by bits (each bit is a line): shifts
# and masks of its codes; products and sums of one token without VNNI, which takes bytes as two
# nibbles. A conversion to floats takes four more.
_SPLIT = {2: 14, 3: 19, 4: 12, 5: 35, 6: 42, 8: 0}
_SPLIT_FOR_16_BITS = 24
_SUMS_OF_16_BITS = {2: 17, 3: 17, 4: 17, 5: 20, 6: 20, 8: 36}
_FACTORS = 48  # to multiply the codes of a block by its factors

# A product of two tiles, of 16 tokens by 64 bytes by 16 rows, takes as long as 32 instructions on
# vectors (16 cycles; of those there are two a cycle), and a tile of weights as long as 16 to load.
# Tiles have a row for each token and no more; those of fewer tokens are taken to be as much faster.
_TILE_TOKENS, _TILE_BYTES, _TILE_PRODUCT = 16, 64, 32
_BFLOATS_BY_AMX = ProductKernel(
    family="tiles",
    unpack=16 / 32,
    product=_TILE_PRODUCT / (_TILE_TOKENS * _TILE_BYTES / 2),
    panel_tokens=2 * _TILE_TOKENS,
)


@dataclass(frozen=True, slots=True)
class PlainKernels:
    """Of executors whose kernels are not described: one multiply-add for a weight and a token.

    ``expert_tile``: grouped products pad each expert's tokens to a multiple of it.
    """

    attention_rows: int = 0
    lanes: NumberFormat | None = None
    expert_ops: int = 0
    expert_tile: int = 1

    def of(self, form: NumberFormat, *, tokens: float, of_experts: bool = False) -> ProductKernel:
        """One kernel for a family."""
        return ProductKernel(
            family="codes" if form.is_quantized else "float",
            tile_tokens=self.expert_tile if of_experts else 1,
        )


PLAIN = PlainKernels()
# Of tuned engines on GPUs: the rows of the tiles that tensor cores are fed with.
GROUPED = PlainKernels(expert_tile=64)
