"""Number formats: how many bytes one element really takes, scales and zero points included."""

from dataclasses import dataclass

from ridgeline.core.errors import SettingsError
from ridgeline.core.rounding import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """How numbers of one tensor are stored.

    ``bits`` are the payload bits of one element. A quantized format has, for every block of
    ``group_size`` elements along the reduction axis (``None``: the whole row) by ``group_rows``
    rows (``None``: all rows), a scale of ``scale_bits`` and, if it is asymmetric, a zero point of
    ``zero_bits``. Beside a scale each ``factor_columns`` elements may have a factor of 8 bits. Rows
    are padded to a multiple of ``row_multiple`` elements.
    """

    name: str
    bits: float
    is_float: bool
    group_size: int | None = None
    group_rows: int | None = 1
    scale_bits: float = 0
    zero_bits: float = 0
    factor_columns: int | None = None
    row_multiple: int = 1

    @property
    def is_quantized(self) -> bool:
        return self.scale_bits > 0

    def bits_per_element(self, row_length: int, rows: int = 2**31) -> float:
        """True bits per element of a matrix, scales and padding included; ``rows`` matters for one
        scale."""
        padded = round_up(row_length, self.row_multiple)
        group = (self.group_size or padded) * (self.group_rows or rows)
        factors = 0.0 if self.factor_columns is None else 8 / self.factor_columns
        bits = self.bits + factors + (self.scale_bits + self.zero_bits) / max(group, 1)
        return bits * padded / max(row_length, 1)

    def num_bytes(self, shape: tuple[int, ...]) -> float:
        """Bytes of a tensor whose last axis is the reduction axis."""
        elements = 1
        for extent in shape:
            elements *= extent
        rows = shape[-2] if len(shape) > 1 else 1
        return elements * self.bits_per_element(shape[-1] if shape else 1, rows) / 8


FLOAT64 = NumberFormat(name="float64", bits=64, is_float=True)
FLOAT32 = NumberFormat(name="float32", bits=32, is_float=True)
BFLOAT16 = NumberFormat(name="bfloat16", bits=16, is_float=True)
FLOAT16 = NumberFormat(name="float16", bits=16, is_float=True)


def _quantized(name: str, bits: float, group_size: int | None, scale_bits: float) -> NumberFormat:
    return NumberFormat(
        name=name, bits=bits, is_float=False, group_size=group_size, scale_bits=scale_bits
    )


# What weights and KV are commonly stored in, scales included. GGUF's blocks of 256 hold 8
# sub-blocks' scales and minima beside two float16 (ggml-common.h); ternary is ggml's TQ1_0.
_QUANTIZED = (
    _quantized("int8", 8, None, 16),  # one scale for each output channel
    _quantized("int6", 6, 32, 16),
    _quantized("int4", 4, 32, 16),
    _quantized("int4-g64", 4, 64, 16),
    _quantized("int4-g128", 4, 128, 16),
    _quantized("int3", 3, 32, 16),
    _quantized("int2", 2, 32, 16),
    _quantized("fp8", 8, None, 32),
    _quantized("nf4", 4, 64, 8 + 32 / 256),  # double quantization (QLoRA, arXiv 2305.14314, §3)
    _quantized("mxfp4", 4, 32, 8),
    _quantized("q4_0", 4, 32, 16),
    _quantized("q8_0", 8, 32, 16),
    _quantized("q4_k", 4, 256, 8 * 12 + 32),
    _quantized("q5_k", 5, 256, 8 * 12 + 32),
    _quantized("q6_k", 6, 256, 16 * 8 + 16),
    _quantized("ternary", 1.625, 256, 16),
)

# What weights can be quantized to as they are loaded.
ON_LOAD = ("int8", "int4", "int4-g64", "int4-g128", "int3", "int2", "fp8")

_BY_NAME = {fmt.name: fmt for fmt in (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)}
_ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ALIASES |= {"double": "float64", "float": "float32", "half": "float16"}


def full_name(name: str) -> str:
    """The name of a format that is called by a short one, as bf16; any other name as it is."""
    short = name.removeprefix("torch.")
    return _ALIASES.get(short, short)


def float_format(name: str) -> NumberFormat:
    """The floating-point format called ``name``; ``torch.`` prefixes and short names are accepted.

    Raises:
        SettingsError: there is no such format.
    """
    fmt = _BY_NAME.get(full_name(name))
    if fmt is None:
        hint = f" {name} is what weights are quantized to: --quantization {name}."
        raise SettingsError(
            f"Unknown number format {name!r}; choose one of {', '.join(sorted(_BY_NAME))}."
            + (hint if name in ON_LOAD else "")
        )
    return fmt


def number_format(name: str) -> NumberFormat:
    """The format called ``name``, floating-point or quantized.

    Raises:
        SettingsError: there is no such format.
    """
    quantized = {fmt.name: fmt for fmt in _QUANTIZED}
    if name in quantized:
        return quantized[name]
    try:
        return float_format(name)
    except SettingsError:
        known = sorted([*_BY_NAME, *quantized])
        raise SettingsError(
            f"Unknown number format {name!r}; choose one of {', '.join(known)}."
        ) from None


def head_format(weights: NumberFormat) -> NumberFormat:
    """What the LM head, and an embedding tied to it, are quantized to where layers are ``weights``.

    Four bits are too few for logits: with the embedded model in int4, held-out text has a KL of
    1.4e-2 to float32 when its head has four bits, and of 9.4e-3 when it has six. GGUF's Q4_0 files
    have six there as well.
    """
    return number_format("int6") if weights.is_quantized and weights.bits < 6 else weights


def table_format(weights: NumberFormat) -> NumberFormat:
    """What an embedding that is only looked up is quantized to where layers are ``weights``.

    A token reads one row of it, so that its bits cost memory and no time.
    """
    return number_format("int8") if weights.is_quantized else weights


def on_load_format(name: str | None) -> NumberFormat | None:
    """The format called ``name`` that weights can be quantized to as they are loaded.

    ``None`` leaves them as they are.

    Raises:
        SettingsError: there is no such format.
    """
    if name is None:
        return None
    if name not in ON_LOAD:
        raise SettingsError(
            f"Weights cannot be quantized to {name!r} on load; choose one of "
            f"{', '.join(ON_LOAD)}. The format of a checkpoint or GGUF file that is quantized "
            "already is read from it."
        )
    return number_format(name)
