"""Number formats: how many bytes one element really takes, scales and zero points included."""

from dataclasses import dataclass

from ridgeline.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """How numbers of one tensor are stored.

    ``bits`` are the payload bits of one element. A quantized format has, for every block of
    ``group_size`` elements along the reduction axis (``None``: the whole row) by ``group_rows``
    rows (``None``: all rows), a scale of ``scale_bits`` and, if it is asymmetric, a zero point of
    ``zero_bits``.
    """

    name: str
    bits: float
    is_float: bool
    group_size: int | None = None
    group_rows: int | None = 1
    scale_bits: float = 0
    zero_bits: float = 0

    @property
    def is_quantized(self) -> bool:
        return self.scale_bits > 0

    def bits_per_element(self, row_length: int, rows: int = 2**31) -> float:
        """True bits per element of a matrix, scales included; ``rows`` matters for one scale."""
        group = (self.group_size or row_length) * (self.group_rows or rows)
        return self.bits + (self.scale_bits + self.zero_bits) / max(group, 1)

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

_BY_NAME = {fmt.name: fmt for fmt in (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)}
_ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ALIASES |= {"double": "float64", "float": "float32", "half": "float16"}


def float_format(name: str) -> NumberFormat:
    """The floating-point format called ``name``; ``torch.`` prefixes and short names are accepted.

    Raises:
        InvalidRequestError: there is no such format.
    """
    short = name.removeprefix("torch.")
    fmt = _BY_NAME.get(_ALIASES.get(short, short))
    if fmt is None:
        raise InvalidRequestError(
            f"Unknown number format {name!r}; choose one of {', '.join(sorted(_BY_NAME))}."
        )
    return fmt
