"""The rungs: each one keeps what the one before changed, but one that shows what KV reuse gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.bench.ladder.replay import ReplaySimulation
from ridgeline.bench.ladder.runs import Drafting, TextDecoder, longest
from ridgeline.bench.ladder.subjects import Subject
from ridgeline.bench.ladder.texts import RecordedText
from ridgeline.core.formats import NumberFormat, on_load_format
from ridgeline.core.plan import ModelRole
from ridgeline.executors.priced import priced_model
from ridgeline.executors.simulated import VirtualClock
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration

LENGTHS = (1, 2, 3, 4, 5, 6, 8)  # of drafts, of which the best predicted one is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """``quantization`` is of the weights as they are loaded, ``draft_quantization`` of a draft
    model's; ``speculates``: with one. ``calibrated``: the codes are those of `ridgeline quantize`,
    of the same format. Without ``reuses_kv`` each token computes its whole context.
    """

    name: str
    executor: str
    dtype: str
    quantization: str | None = None
    draft_quantization: str | None = None
    calibrated: bool = False
    speculates: bool = False
    reuses_kv: bool = True

    @property
    def formats(self) -> dict[ModelRole, NumberFormat | None]:
        """What the weights of each of its models are quantized to."""
        names = {ModelRole.TARGET: self.quantization}
        if self.speculates:
            names[ModelRole.DRAFT] = self.draft_quantization
        return {role: on_load_format(name) for role, name in names.items()}


RUNGS = (
    Rung(name="eager PyTorch, float32", executor="reference", dtype="float32"),
    Rung(name="bfloat16", executor="reference", dtype="bfloat16"),
    Rung(name="own kernels, no KV cache", executor="cpu", dtype="bfloat16", reuses_kv=False),
    Rung(name="own kernels", executor="cpu", dtype="bfloat16"),
    Rung(name="int8 weights", executor="cpu", dtype="bfloat16", quantization="int8"),
    Rung(name="int4 weights", executor="cpu", dtype="bfloat16", quantization="int4"),
    Rung(
        name="int4 weights, calibrated",
        executor="cpu",
        dtype="bfloat16",
        quantization="int4",
        calibrated=True,
    ),
    Rung(
        name="speculation, draft model",
        executor="cpu",
        dtype="bfloat16",
        quantization="int4",
        calibrated=True,
        draft_quantization="int4",
        speculates=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a rung is predicted to reach, before anything of it was measured."""

    drafting: Drafting = field(default_factory=Drafting)
    tokens_per_s: float


def priced_models(subject: Subject, rung: Rung) -> Mapping[ModelRole, PricedModel]:
    """Both models as the roofline sees them in a rung's formats."""
    models = subject.models(rung.dtype, rung.formats)
    return {role: priced_model(model, rung.executor) for role, model in models.items()}


def forecast(
    models: Mapping[ModelRole, PricedModel],
    calibration: Calibration,
    texts: Sequence[RecordedText],
    num_tokens: int,
    drafting: Drafting,
    *,
    reuse_kv: bool = True,
) -> Forecast:
    """The engine's own scheduler and drafters over a simulated executor."""
    clock = VirtualClock()
    decoder = TextDecoder(
        ReplaySimulation(models, calibration, clock, texts=texts),
        max_model_len=longest(texts, num_tokens),
        has_draft=ModelRole.DRAFT in models,
        clock=clock,
        reuse_kv=reuse_kv,
    )
    run = decoder.run(texts, drafting, num_tokens)
    return Forecast(drafting=drafting, tokens_per_s=run.tokens_per_s)


def best_forecast(
    models: Mapping[ModelRole, PricedModel],
    calibration: Calibration,
    texts: Sequence[RecordedText],
    num_tokens: int,
    speculation: str,
) -> Forecast:
    """The forecast of the draft length that is the fastest by prediction."""
    forecasts = (
        forecast(
            models,
            calibration,
            texts,
            num_tokens,
            Drafting(speculation=speculation, length=length),
        )
        for length in LENGTHS
    )
    return max(forecasts, key=lambda each: each.tokens_per_s)
