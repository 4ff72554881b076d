"""Ridgeline's side: the checkpoint loaded by the engine's own loader, run by hand-written plans."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tests.tiny import Driver

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.core.rounding import ceil_div
from ridgeline.engine.loading import LoadedModel, load_model
from ridgeline.executors import create_executor
from ridgeline.executors.model import ExecutorModel

_BLOCK_TOKENS = 16
_LOGITS = Outputs(logits=True)


def load(folder: Path, *, max_model_len: int | None = None) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), dtype="float32", max_model_len=max_model_len))


def run(
    model: ExecutorModel, token_ids: Sequence[int], *, prompt_tokens: int, name: str = "reference"
) -> np.ndarray:
    """Logits ``[T, V]``: the prompt's tokens in one pass, the others one at a time."""
    num_blocks = ceil_div(len(token_ids), _BLOCK_TOKENS)
    executor = create_executor(
        {ModelRole.TARGET: model}, EngineConfig(executor=name, block_tokens=_BLOCK_TOKENS)
    )
    try:
        executor.allocate_kv([num_blocks] * len(executor.kv_layout().block_bytes))
        driver = Driver(executor, blocks_per_slot=num_blocks)
        logits = [driver.start(0, token_ids[:prompt_tokens], outputs=_LOGITS).logits]
        for position in range(prompt_tokens, len(token_ids)):
            segment = driver.segment(
                0, position, token_ids[position : position + 1], outputs=_LOGITS
            )
            logits.append(driver.run(segment).passes[0][0].logits)
    finally:
        executor.close()
    return np.concatenate(logits)
