"""The types of GGUF files that are written, by the names that llama.cpp gives them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileType:
    """What ``--gguf-type`` names: ``general.file_type`` (``llama_ftype``) and the usual format."""

    number: int
    format: str


FILE_TYPES: Mapping[str, FileType] = {
    "f32": FileType(number=0, format="F32"),
    "f16": FileType(number=1, format="F16"),
    "bf16": FileType(number=32, format="BF16"),
    "q8_0": FileType(number=7, format="Q8_0"),
    "q6_k": FileType(number=18, format="Q6_K"),
    "q5_k_m": FileType(number=17, format="Q5_K"),
    "q5_k_s": FileType(number=16, format="Q5_K"),
    "q4_k_m": FileType(number=15, format="Q4_K"),
    "q4_k_s": FileType(number=14, format="Q4_K"),
    "q4_0": FileType(number=2, format="Q4_0"),
    "q3_k_l": FileType(number=13, format="Q3_K"),
    "q3_k_m": FileType(number=12, format="Q3_K"),
    "q3_k_s": FileType(number=11, format="Q3_K"),
    "q2_k": FileType(number=10, format="Q2_K"),
}
