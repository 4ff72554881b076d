"""What is measured, and in how long."""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.models import PRESETS

_TINY: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Cases in the order of their weight: what the time does not suffice for is left out, and the
    report says so.

    Attributes:
        shapes: models by name, as the config.json that each was published with; the first is the
            ladder's.
        formats: of the weights; bfloat16 is that of the model.
        decode: (batch, tokens of context) of decode steps.
        sampled: the same, of decode steps that draw tokens by top-p.
        prompts: tokens of prompts.
        coded: (batch, tokens of context) of attention over int8 and float8 KV.
        experts: how many, how many of a token, and their inputs and inner width, of a mixture.
        routed: tokens that go through the mixture.
        compiles: the ladder has PyTorch's compiler beside it, which takes minutes.
        minutes: after which no other case is begun.
        patience_s: after which a case counts as hanging.
        matrix: side of the square matrices of the measured peaks.
        stream_bytes: of the arrays that are read and copied for the measured bandwidth.
        beyond_caches_bytes: of the data that calls of one kernel go through in turn.
        spin_s: of work before a kernel is timed, in which clocks rise.
        window_s: of work of a kernel in one measurement, at the least.
        steps_s: the same of a model's steps.
        repeats: measurements of one thing, of which the median counts.
    """

    shapes: Mapping[str, Mapping[str, object]]
    formats: tuple[str, ...]
    decode: tuple[tuple[int, int], ...]
    sampled: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    coded: tuple[tuple[int, int], ...]
    experts: tuple[int, int, int, int]
    routed: tuple[int, ...]
    compiles: bool
    minutes: float
    patience_s: float
    matrix: int
    stream_bytes: int
    beyond_caches_bytes: int
    spin_s: float
    window_s: float
    steps_s: float
    repeats: int


FULL = Settings(
    shapes={name: PRESETS[name] for name in ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b")},
    formats=("bfloat16", "int4", "fp8", "int8", "int4-g128"),
    decode=tuple((batch, at) for at in (512, 4096, 32_000) for batch in (1, 8, 64, 256)),
    sampled=((1, 512), (64, 512)),
    prompts=(4096, 512, 16_384),
    coded=((8, 4096), (64, 4096)),
    experts=(128, 8, 2048, 768),
    routed=(16, 256),
    compiles=True,
    minutes=8.0,
    patience_s=240.0,
    matrix=8192,
    stream_bytes=4 << 30,
    beyond_caches_bytes=192 << 20,
    spin_s=0.1,
    window_s=0.03,
    steps_s=0.06,
    repeats=5,
)

MINIATURE = Settings(
    shapes={"tiny": _TINY, "tiny-2": _TINY | {"num_hidden_layers": 1}},
    formats=("bfloat16", "int4", "fp8"),
    decode=((1, 32), (3, 40)),
    sampled=((1, 32),),
    prompts=(24,),
    coded=((2, 32),),
    experts=(4, 2, 64, 64),
    routed=(3,),
    compiles=False,
    minutes=10.0,
    patience_s=240.0,
    matrix=256,
    stream_bytes=1 << 16,
    beyond_caches_bytes=1 << 18,
    spin_s=0.0,
    window_s=0.0,
    steps_s=0.0,
    repeats=1,
)
