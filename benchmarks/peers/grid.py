"""The settings that are tried for each peer; each cell is measured at the best of them.

A cell's kind says which of its settings can matter: prompts, decode of small contexts, and decode
at a long one. ``cores_left`` cores of the machine stay idle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Setting = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure: prompt tokens per second, or output tokens per second of a batch."""

    kind: str  # "prefill", "decode" or "long"
    tokens: int  # of the prompt, or of the context behind the decode
    batch: int = 1

    @property
    def name(self) -> str:
        """As `ridgeline bench` names it."""
        if self.kind == "prefill":
            return f"prefill {self.tokens}"
        return f"decode {self.batch}" + (f" at {self.tokens}" if self.tokens else "")


CELLS = (
    Cell(kind="prefill", tokens=512),
    Cell(kind="prefill", tokens=2048),
    *(Cell(kind="decode", tokens=0, batch=batch) for batch in (1, 4, 8, 16, 32)),
    Cell(kind="long", tokens=4096),
)
# What stands for a kind while settings are tried.
TRIED = {
    "prefill": (CELLS[0],),
    "decode": (CELLS[2], CELLS[4], CELLS[6]),
    "long": (CELLS[7],),
}

LLAMA_CPP_INT4: Mapping[str, Sequence[Setting]] = {
    "prefill": (
        {"form": "q4_0", "flash": "on", "ubatch": 512},
        {"form": "q4_0", "flash": "off", "ubatch": 512},
        {"form": "q4_0", "flash": "on", "ubatch": 128},
        {"form": "q4_0", "flash": "on", "ubatch": 2048},
        {"form": "q4_0-pure", "flash": "on", "ubatch": 512},
    ),
    "decode": (
        {"form": "q4_0", "flash": "on"},
        {"form": "q4_0", "flash": "off"},
        {"form": "q4_0-pure", "flash": "on"},
        {"form": "q4_0-pure", "flash": "off"},
        {"form": "q4_0", "flash": "on", "cores_left": 1},
    ),
    "long": (
        {"form": "q4_0-pure", "flash": "on", "kv": "f16"},
        {"form": "q4_0-pure", "flash": "off", "kv": "f16"},
        {"form": "q4_0-pure", "flash": "on", "kv": "q8_0"},
    ),
}
LLAMA_CPP_BF16: Mapping[str, Sequence[Setting]] = {
    "prefill": (
        {"form": "bf16", "flash": "on", "ubatch": 512},
        {"form": "bf16", "flash": "off", "ubatch": 512},
        {"form": "bf16", "flash": "on", "ubatch": 128},
    ),
    "decode": ({"form": "bf16", "flash": "on"}, {"form": "bf16", "flash": "off"}),
    "long": (
        {"form": "bf16", "flash": "on", "kv": "f16"},
        {"form": "bf16", "flash": "off", "kv": "f16"},
        {"form": "bf16", "flash": "on", "kv": "bf16"},
    ),
}
OPENVINO_INT4: Mapping[str, Sequence[Setting]] = {
    "prefill": (
        {"form": "int4", "backend": "SDPA", "group": 128},
        {"form": "int4", "backend": "SDPA", "group": 32},
        {"form": "int4-all", "backend": "SDPA", "group": 128},
        {"form": "int4", "backend": "PA", "group": 128, "batched_tokens": 2048},
        {"form": "int4", "backend": "PA", "group": 128, "batched_tokens": 512},
    ),
    "decode": (
        {"form": "int4", "backend": "SDPA", "group": 128},
        {"form": "int4-all", "backend": "SDPA", "group": 128},
        {"form": "int4-all", "backend": "SDPA", "group": 32},
        {"form": "int4-all", "backend": "PA", "group": 128},
    ),
    "long": (
        {"form": "int4-all", "backend": "SDPA", "group": 128, "kv": "u8"},
        {"form": "int4-all", "backend": "SDPA", "group": 128, "kv": "f16"},
        {"form": "int4-all", "backend": "PA", "group": 128, "kv": "u8"},
    ),
}
TRANSFORMERS: Mapping[str, Sequence[Setting]] = {
    kind: ({"dtype": "bfloat16", "attention": "sdpa"}, {"dtype": "float32", "attention": "sdpa"})
    for kind in ("prefill", "decode", "long")
}
