"""What climbs the ladder: the embedded pair, and shapes with random weights and drafters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import NumberFormat, float_format
from ridgeline.core.plan import ModelRole
from ridgeline.core.settings.speculation import HEAD_SPECULATION
from ridgeline.core.spec import EagleSpec
from ridgeline.engine.draft_head import head_model
from ridgeline.engine.loading import load_model
from ridgeline.engine.speculation import load_draft, with_draft
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import PRESETS, describe, describe_head, describe_mtp, lower
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


# Of Llama 3.1 8B: https://huggingface.co/yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
EAGLE3_8B: Mapping[str, object] = {
    **PRESETS["llama-3.1-8b"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
}
# Qwen3 1.7B, as if it had been trained with a layer that predicts one token more.
MTP_2B: Mapping[str, object] = {
    **PRESETS["qwen3-0.6b"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_nextn_predict_layers": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A target and its draft; without configs the embedded ones, with their real weights.

    ``speculation`` says what drafts; ``draft`` is the config of the draft model or of the EAGLE-3
    drafter, and `None` if that is the target's own layer.
    """

    name: str
    config: Mapping[str, object] | None = None
    draft: Mapping[str, object] | None = None
    speculation: str = "draft"

    @property
    def is_random(self) -> bool:
        return self.config is not None

    def models(
        self, dtype: str, formats: Mapping[ModelRole, NumberFormat | None]
    ) -> dict[ModelRole, ExecutorModel]:
        """The models of some roles, in a type and quantized to formats as they are loaded."""
        if self.config is not None:
            target = _random(self.config, dtype)
            models = with_draft(target, self._random_draft(target))
        else:
            settings = EngineConfig(dtype=dtype, speculation="draft")
            loaded = load_model(settings)
            draft = load_draft(settings, loaded)
            assert draft is not None
            models = {ModelRole.TARGET: loaded.model, ModelRole.DRAFT: draft}
        return {role: replace(models[role], quantization=form) for role, form in formats.items()}

    def _random_draft(self, target: ExecutorModel) -> ExecutorModel:
        assert self.config is not None
        if self.speculation not in HEAD_SPECULATION:
            assert self.draft is not None
            return _random(self.draft, target.dtype)
        if self.draft is None:
            definition = describe_mtp(describe(self.config), None)
        else:
            definition = describe_head(self.draft, target.spec, ("fc.weight", "lm_head.weight"))
        head, rows = definition.spec, None
        if isinstance(head, EagleSpec):
            rows = np.arange(head.vocab_size)
        model = head_model(
            target, definition, lambda ops: DummyWeights(ops=ops, dtype=target.dtype, seed=0)
        )
        return replace(model, token_ids=rows)


SUBJECTS: Mapping[str, Subject] = {
    "embedded": Subject(name="embedded"),
    "1b": Subject(name="llama-3.2-1b", config=PRESETS["llama-3.2-1b"], draft=DRAFT_100M),
}
# Whose drafts are replayed, with recorded or published acceptance.
REPLAYED: Mapping[str, Subject] = {
    "1b": SUBJECTS["1b"],
    "8b": Subject(
        name="llama-3.1-8b",
        config=PRESETS["llama-3.1-8b"],
        draft=EAGLE3_8B,
        speculation="eagle3",
    ),
    "2b": Subject(name="qwen3-1.7b", config=MTP_2B, speculation="mtp"),
}


def _random(config: Mapping[str, object], dtype: str) -> ExecutorModel:
    spec = describe(config).spec
    ops = lower(spec)
    kind = float_format(dtype).name
    return ExecutorModel(
        spec=spec, ops=ops, weights=DummyWeights(ops=ops, dtype=kind, seed=0), dtype=kind
    )
