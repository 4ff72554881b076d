"""What climbs the ladder: the embedded pair, and a pair of shapes with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import NumberFormat, float_format
from ridgeline.core.plan import ModelRole
from ridgeline.engine.loading import load_model
from ridgeline.engine.speculation import load_draft
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import PRESETS, describe, lower
from ridgeline.weights import DummyWeights

# About 100M parameters, of which 66M are the embedding that the vocabulary asks for.
DRAFT_100M: Mapping[str, object] = {
    **PRESETS["llama-3.2-1b"],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A target and its draft; without configs the embedded ones, with their real weights."""

    name: str
    config: Mapping[str, object] | None = None
    draft: Mapping[str, object] | None = None

    @property
    def is_random(self) -> bool:
        return self.config is not None

    def models(
        self, dtype: str, formats: Mapping[ModelRole, NumberFormat | None]
    ) -> dict[ModelRole, ExecutorModel]:
        """The models of some roles, in a type and quantized to formats as they are loaded."""
        if self.config is not None:
            assert self.draft is not None
            configs = {ModelRole.TARGET: self.config, ModelRole.DRAFT: self.draft}
            models = {role: _random(config, dtype) for role, config in configs.items()}
        else:
            settings = EngineConfig(dtype=dtype, speculation="draft")
            loaded = load_model(settings)
            draft = load_draft(settings, loaded)
            assert draft is not None
            models = {ModelRole.TARGET: loaded.model, ModelRole.DRAFT: draft}
        return {role: replace(models[role], quantization=form) for role, form in formats.items()}


SUBJECTS: Mapping[str, Subject] = {
    "embedded": Subject(name="embedded"),
    "1b": Subject(name="llama-3.2-1b", config=PRESETS["llama-3.2-1b"], draft=DRAFT_100M),
}


def _random(config: Mapping[str, object], dtype: str) -> ExecutorModel:
    spec = describe(config).spec
    ops = lower(spec)
    kind = float_format(dtype).name
    return ExecutorModel(
        spec=spec, ops=ops, weights=DummyWeights(ops=ops, dtype=kind, seed=0), dtype=kind
    )
