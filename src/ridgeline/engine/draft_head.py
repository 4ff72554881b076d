"""Loading a drafter that reads the target's hidden states."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import CorruptFileError, SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import TOKEN_MAP, describe_head, lower_head, read_config
from ridgeline.weights import Checkpoint, CheckpointWeights, locate_model
from ridgeline.weights.progress import Progress

_log = logging.getLogger(__name__)


def load_draft_head(
    config: EngineConfig, name: str, target: ExecutorModel, *, progress: Progress | None = None
) -> ExecutorModel:
    """The drafter ``name`` of a model, all but its weights: the executor streams them.

    Its type is the target's.

    Raises (and so does the stream):
        SettingsError: it was made for another model.
        ModelFileError: it is missing, damaged or not supported.
        MachineError: no network or disk for it.
    """
    folder = locate_model(name, offline=config.offline, progress=progress)
    if not folder.is_dir():
        raise SettingsError(f"speculation={config.speculation!r} takes drafters of safetensors.")
    with Checkpoint(folder) as checkpoint:
        definition = describe_head(read_config(folder), target.spec, checkpoint.names())
        token_ids = _token_ids(folder, checkpoint, definition.spec.vocab_size, target)
    if definition.unknown:
        _log.warning(
            "config.json of the drafter has keys that Ridgeline does not know: %s.",
            ", ".join(definition.unknown),
        )
    spec = replace(target.spec, draft_head=definition.spec, hidden_size=definition.spec.hidden_size)
    ops = lower_head(replace(target.spec, draft_head=definition.spec))
    borrowed = definition.borrowed.keys()
    own = [op for op in ops if not borrowed & {weight.name for weight in op_weights(op)}]
    quantization = config.draft_quantization
    return ExecutorModel(
        spec=spec,
        ops=ops,
        weights=CheckpointWeights(
            path=folder,
            ops=own,
            sources=definition.sources,
            ignored=definition.ignored,
            dtype=target.dtype,
            progress=progress,
        ),
        dtype=target.dtype,
        quantization=on_load_format(
            config.quantization if quantization == "auto" else quantization
        ),
        adapters=tuple({} for _ in config.adapters),
        borrowed=definition.borrowed,
        token_ids=token_ids,
    )


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
