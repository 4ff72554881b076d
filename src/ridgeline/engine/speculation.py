"""From settings to drafters and a draft model."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ridgeline.core.config import EngineConfig, ResolvedConfig, with_overrides
from ridgeline.core.errors import SettingsError
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import ConstraintFactory, Executor, StepTimePredictor
from ridgeline.core.settings.speculation import DRAFT_MODEL_SPECULATION
from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.engine.draft_head import load_draft_head, names_head
from ridgeline.engine.loading import LoadedModel, Progress, load_model
from ridgeline.executors.model import ExecutorModel
from ridgeline.scheduler import (
    DraftModel,
    DraftModelConfig,
    DraftPasses,
    EarlyExit,
    FeatureHead,
    Speculation,
)
from ridgeline.scheduler.prediction import DEFAULT_PREDICTOR
from ridgeline.weights import EMBEDDED, Adapter, embedded_draft_folder

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def load_draft(
    config: EngineConfig, target: LoadedModel, *, progress: Progress | None = None
) -> ExecutorModel | None:
    """The draft model, if these settings use one. The embedded model has its own.

    The revision in the settings is the target's; a draft model is its repository's default.

    Raises:
        SettingsError: none is named, two are, or it has another vocabulary.
    """
    name = config.draft_model
    if config.speculation == "exit" or config.draft_layers is not None:
        if name is not None or config.draft_quantization != "auto":
            raise SettingsError(
                "draft_layers drafts with the model's own layers, in their own format; leave out "
                "draft_model and draft_quantization."
            )
        return target.model.exit_after(
            config.draft_layers or max(1, len(target.model.spec.layers) // 4)
        )
    if names_head(config, progress=progress):
        return load_draft_head(config, target, progress=progress)
    if name is None and config.model in (None, EMBEDDED):
        name = str(embedded_draft_folder())
    if config.speculation in ("draft", "combined") and name is None:
        raise SettingsError(
            f"speculation={config.speculation!r} needs draft_model, a smaller model with the same "
            "vocabulary."
        )
    if config.speculation not in DRAFT_MODEL_SPECULATION or name is None:
        if config.draft_quantization != "auto":
            raise SettingsError("draft_quantization needs draft_model: there is none.")
        return None
    own: dict[str, object] = {"adapters": {}, "chat_template": None, "revision": None}
    if config.draft_quantization != "auto":
        own["quantization"] = config.draft_quantization
    draft = load_model(with_overrides(config, model=name, **own), progress=progress)
    _check_vocabulary(target, draft)
    # Adapters change the target alone; its draft is the same for all of them.
    adapters: tuple[Adapter, ...] = tuple({} for _ in config.adapters)
    return replace(draft.model, adapters=adapters)


def with_draft(
    target: ExecutorModel, draft: ExecutorModel | None
) -> dict[ModelRole, ExecutorModel]:
    """The models of an engine, the target keeping what the draft model reads."""
    if draft is None:
        return {ModelRole.TARGET: target}
    head = draft.spec.draft_head
    if draft.is_head and head is not None:
        target = target.with_features(head)
    return {ModelRole.TARGET: target, ModelRole.DRAFT: draft}


def _check_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    digests = [model.tokenizer and model.tokenizer.digest() for model in (target, draft)]
    if target.model.spec.vocab_size != draft.model.spec.vocab_size or digests[0] != digests[1]:
        raise SettingsError(
            f"The draft model {draft.name} has another vocabulary than {target.name}; its tokens "
            "would mean something else."
        )


def make_grammars(target: LoadedModel) -> GrammarCompiler | None:
    """What compiles structured outputs; a model without a tokenizer has none."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return None
    texts = ((tokenizer.id_to_token(index), index) for index in sorted(tokenizer.special_ids))
    special = {text: index for text, index in texts if text is not None}

    def vocabulary() -> "LLTokenizer":
        from ridgeline.decoding.grammars.vocabulary import grammar_vocabulary  # llguidance

        return grammar_vocabulary(tokenizer, target.model.spec.vocab_size)

    return GrammarCompiler(vocabulary, special)


def sharing_passes(draft: ExecutorModel | None) -> DraftPasses | None:
    """The draft passes of a model whose KV is in the target's blocks."""
    if draft is None or not draft.shares_kv:
        return None
    head = draft.spec.draft_head
    return EarlyExit() if draft.is_exit else FeatureHead(has_kv=bool(head and head.layers))


def make_speculation(
    config: EngineConfig,
    resolved: ResolvedConfig,
    executor: Executor,
    *,
    predictor: StepTimePredictor = DEFAULT_PREDICTOR,
    constraints: ConstraintFactory | None = None,
    sharing: DraftPasses | None = None,
) -> Speculation:
    """What the scheduler asks about drafts; ``sharing``: of a model with KV in the target's blocks
    (`sharing_passes`)."""
    draft_model = sharing
    if draft_model is None and resolved.num_draft_blocks:
        layout = executor.kv_layout(ModelRole.DRAFT)
        draft_model = DraftModel(
            DraftModelConfig(
                num_blocks=resolved.num_draft_blocks,
                windows=tuple(group.window for group in layout.groups),
                block_tokens=resolved.block_tokens,
                max_pass_tokens=resolved.max_num_batched_tokens,
                max_model_len=executor.spec(ModelRole.DRAFT).max_position,
                kv_ttl_s=config.kv_ttl_s,
            )
        )
    drafter = None
    if config.speculation != "off":
        from ridgeline.decoding.drafters import make_drafter  # all of them

        drafter = make_drafter(
            config.speculation,
            predictor,
            max_tokens=config.num_speculative_tokens,
            has_model=draft_model is not None,
            is_tree=config.draft_shape == "tree",
        )
    return Speculation(
        drafter=drafter,
        max_tokens=config.num_speculative_tokens,
        draft_model=draft_model,
        constraints=constraints,
        only_chains=config.verification == "rejection",
    )
