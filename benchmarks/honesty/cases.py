"""What is calibrated on, and what is tested: other shapes, other formats, other steps."""

from collections.abc import Mapping, Sequence

from ridgeline.bench.calibration import SHAPES, STEPS, Config, shape
from ridgeline.bench.step_timing import StepShape

# Never calibrated on: grouped queries with a tied head and biases, and a width of its own.
UNSEEN_SHAPES: Mapping[str, Config] = {
    "tall": shape(1280, 3456, 5, 20, 4, 6144),
    "experts": shape(
        1024,
        1024,
        4,
        16,
        4,
        4096,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "tied": shape(896, 2432, 8, 14, 2, 16384, model_type="qwen2", tie_word_embeddings=True),
}
ALL_SHAPES: Mapping[str, Config] = {**SHAPES, **UNSEEN_SHAPES}

# Never calibrated on: the last of each.
CALIBRATED_FORMATS: Mapping[str, Sequence[str]] = {
    "cpu": ("float32", "bfloat16", "int8"),
    "reference": ("float32", "bfloat16"),
}
UNSEEN_FORMAT = {"cpu": "int4", "reference": "float64"}


# No step of the calibration is among them.
TEST_STEPS = (
    *(StepShape(batch_size=b, num_tokens=1, context=c) for b, c in (
        (1, 250), (1, 1000), (2, 600), (3, 64), (4, 350), (6, 900), (8, 250), (12, 128), (16, 500),
    )),
    *(StepShape(batch_size=b, num_tokens=n, context=c) for b, n, c in (
        (1, 24, 0), (1, 48, 200), (1, 96, 0), (1, 192, 300), (2, 100, 0), (3, 32, 128),
    )),
    *(StepShape(batch_size=b, num_tokens=n, context=c, decodes=d) for b, n, c, d in (
        (1, 64, 0, 8), (1, 128, 200, 4), (2, 32, 100, 12),
    )),
    *(StepShape(batch_size=b, num_tokens=1 + k, context=c, drafts=k) for b, c, k in (
        (1, 250, 4), (4, 350, 4), (8, 250, 2),
    )),
)  # fmt: skip


# Steps of the calibration that are measured again with the tests.
REPEATED_STEPS = STEPS[::2]


def repeated_models(executor: str) -> list[tuple[str, str]]:
    """(shape, format) of calibrated models that are measured again; none is tested."""
    plain = CALIBRATED_FORMATS[executor]
    return [("wide", plain[1]), ("deep", plain[-1])]


def tested_models(executor: str) -> list[tuple[str, str]]:
    """(shape, format) of each model that is tested."""
    plain, unseen = CALIBRATED_FORMATS[executor], UNSEEN_FORMAT[executor]
    return [
        ("wide", plain[-1]),
        ("deep", plain[0]),
        *(("tall", form) for form in (*plain[1:], unseen)),
        *(("tied", form) for form in (plain[1], unseen)),
        ("wide", unseen),
        ("experts", plain[1]),
        *((("experts", unseen), ("wide", "int3")) if executor == "cpu" else ()),
    ]
