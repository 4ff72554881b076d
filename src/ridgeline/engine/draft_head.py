"""Loading a drafter that reads the target's hidden states."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import CorruptFileError, SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.ops import Op
from ridgeline.core.plan import tree_depth
from ridgeline.core.settings.speculation import HEAD_SPECULATION
from ridgeline.core.spec import DraftHeadSpec, EagleSpec, MedusaSpec
from ridgeline.core.weight_uses import op_weights
from ridgeline.engine.loading import LoadedModel
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import (
    TOKEN_MAP,
    DraftHeadDefinition,
    describe_head,
    describe_medusa,
    describe_mtp,
    is_draft_head,
    lower_head,
    lower_later_heads,
    read_config,
)
from ridgeline.quant import read_scheme
from ridgeline.weights import (
    Checkpoint,
    CheckpointWeights,
    DummyWeights,
    WeightSource,
    locate_model,
)
from ridgeline.weights.progress import Progress

OWN_LAYER = "mtp"  # as draft_model: the model's own layer that predicts one token more

_log = logging.getLogger(__name__)


def names_head(config: EngineConfig, *, progress: Progress | None = None) -> bool:
    """Whether these settings draft with what reads the target's hidden states, alone or beside
    others.

    Raises:
        ModelFileError: draft_model is missing or damaged.
        MachineError: no network or disk for it.
    """
    if config.speculation in HEAD_SPECULATION:
        return True
    name = config.draft_model
    if name is None or config.speculation not in ("combined", "adaptive"):
        return False
    if name == OWN_LAYER:
        return True
    folder = locate_model(name, offline=config.offline, progress=progress)
    return folder.is_dir() and is_draft_head(read_config(folder))


def load_draft_head(
    config: EngineConfig, target: LoadedModel, *, progress: Progress | None = None
) -> ExecutorModel:
    """The drafter of a model, in a folder of its own or in the model's, all but its weights: the
    executor streams them.

    Its type is the target's.

    Raises (and so does the stream):
        SettingsError: none is named, it was made for another model, or the model has none.
        ModelFileError: it is missing, damaged or not supported.
        MachineError: no network or disk for it.
    """
    model, token_ids = target.model, None
    scheme = None
    if config.speculation == "mtp" or config.draft_model == OWN_LAYER:
        folder = None if config.load_format == "dummy" else target.folder
        definition = _own_layer(target, folder)
        if target.definition.quantization is not None:
            scheme = read_scheme(target.definition.quantization, strict=config.strict)
    elif config.speculation == "medusa":
        folder = _named_folder(config, progress)
        definition = describe_medusa(read_config(folder), model.spec)
        _check_num_heads(config, definition.spec)
    else:
        folder = _named_folder(config, progress)
        with Checkpoint(folder) as checkpoint:
            definition = describe_head(read_config(folder), model.spec, checkpoint.names())
            assert isinstance(definition.spec, EagleSpec)
            token_ids = _token_ids(folder, checkpoint, definition.spec.vocab_size, model)
    if definition.unknown:
        _log.warning(
            "config.json of the drafter has keys that Ridgeline does not know: %s.",
            ", ".join(definition.unknown),
        )

    def open_weights(ops: Sequence[Op]) -> WeightSource:
        if folder is None:
            return DummyWeights(ops=ops, dtype=model.dtype, seed=config.seed)
        return CheckpointWeights(
            path=folder,
            ops=ops,
            sources=definition.sources,
            ignored=definition.ignored,
            dtype=model.dtype,
            quantization=scheme,
            progress=progress,
        )

    name = config.draft_quantization
    return replace(
        head_model(model, definition, open_weights),
        quantization=on_load_format(config.quantization if name == "auto" else name),
        adapters=tuple({} for _ in config.adapters),
        token_ids=token_ids,
    )


def head_model(
    target: ExecutorModel,
    definition: DraftHeadDefinition,
    open_weights: Callable[[Sequence[Op]], WeightSource],
) -> ExecutorModel:
    """The drafter that a definition makes of a target, with its weights as they are;
    ``open_weights`` of the ops that read those that are not borrowed."""
    spec = replace(target.spec, draft_head=definition.spec)
    ops, later = lower_head(spec), lower_later_heads(spec)
    borrowed = definition.borrowed.keys()
    every = [*ops, *(op for ops in later for op in ops)]
    own = [op for op in every if not borrowed & {weight.name for weight in op_weights(op)}]
    return ExecutorModel(
        spec=replace(spec, hidden_size=definition.spec.hidden_size),
        ops=ops,
        weights=open_weights(own),
        dtype=target.dtype,
        borrowed=definition.borrowed,
        later=later,
    )


def _check_num_heads(config: EngineConfig, head: DraftHeadSpec) -> None:
    """
    Raises:
        SettingsError: more tokens are to be drafted, one after the other, than there are heads.
    """
    assert isinstance(head, MedusaSpec)
    wanted = config.num_speculative_tokens
    depth = tree_depth(wanted) if config.draft_shape == "tree" else wanted
    if depth > head.num_heads:
        raise SettingsError(
            f"The drafter has {head.num_heads} heads, and num_speculative_tokens {wanted} takes "
            f"{depth} in a {config.draft_shape}; set fewer."
        )


def _own_layer(target: LoadedModel, folder: Path | None) -> DraftHeadDefinition:
    """What the model's own files have; without a ``folder`` they are random."""
    if folder is None:
        return describe_mtp(target.definition, None)
    _refuse_files(folder, "mtp")
    with Checkpoint(folder) as checkpoint:
        return describe_mtp(target.definition, checkpoint.names())


def _named_folder(config: EngineConfig, progress: Progress | None) -> Path:
    if config.draft_model is None:
        raise SettingsError(
            f"speculation={config.speculation!r} needs draft_model, a drafter of this model."
        )
    folder = locate_model(config.draft_model, offline=config.offline, progress=progress)
    _refuse_files(folder, config.speculation)
    return folder


def _refuse_files(path: Path, speculation: str) -> None:
    if not path.is_dir():
        raise SettingsError(f"speculation={speculation!r} takes drafters of safetensors.")


def _token_ids(
    folder: Path, checkpoint: Checkpoint, num_rows: int, target: ExecutorModel
) -> Array | None:
    """The target's token of each row of the drafter's head; ``None``: those of all rows.

    Raises:
        CorruptFileError: the file's map is missing, or is none.
    """
    vocab_size = target.spec.vocab_size
    if TOKEN_MAP not in checkpoint.names():
        if num_rows != vocab_size:
            raise CorruptFileError(
                f"{folder} has no {TOKEN_MAP}, which says what its {num_rows:,} tokens are."
            )
        return None
    steps = checkpoint.tensor(TOKEN_MAP)
    if steps.shape != (num_rows,) or steps.dtype != np.int64:
        raise CorruptFileError(f"{folder}: {TOKEN_MAP} is not {num_rows:,} 64-bit numbers.")
    token_ids = steps + np.arange(num_rows)
    is_map = len(np.unique(token_ids)) == num_rows
    if not is_map or token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise CorruptFileError(
            f"{folder}: {TOKEN_MAP} names tokens twice, or such as are not there."
        )
    return token_ids
