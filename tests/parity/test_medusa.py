"""Medusa's heads: logits against their formula over transformers' target."""

import numpy as np
import pytest
import torch
from tests.medusa import head_logits, head_tensors, write_heads
from tests.parity.test_eagle3 import EXECUTORS, LOGITS, TOKENS
from tests.tiny import CONFIG, Driver

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    CorruptFileError,
    SettingsError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from ridgeline.core.plan import ModelRole, Pass
from ridgeline.engine.loading import load_model
from ridgeline.engine.speculation import load_draft, with_draft
from ridgeline.executors import create_executor

SIZES = CONFIG["hidden_size"], CONFIG["vocab_size"]


def engine_config(folder, heads, executor="reference", **settings):
    settings = {"num_speculative_tokens": 3} | settings
    return EngineConfig(
        model=str(folder), executor=executor, speculation="medusa", draft_model=str(heads),
        dtype="float32", **settings,
    )  # fmt: skip


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("num_blocks", "prefix"), [(1, ""), (2, "medusa_head."), (0, "")], ids=str)
def test_each_draft_s_logits_are_those_of_its_own_head(
    tmp_path, target, executor, num_blocks, prefix
):
    """The last token's features are not there yet: heads read those of the token before."""
    model, folder = target
    tensors = head_tensors(*SIZES, num_blocks=num_blocks)
    write_heads(tmp_path / "heads", tensors, num_blocks=num_blocks, prefix=prefix)
    config = engine_config(folder, tmp_path / "heads", executor)
    loaded = load_model(config)
    executor = create_executor(with_draft(loaded.model, load_draft(config, loaded)), config)
    try:
        executor.allocate_kv([4] * len(executor.kv_layout().block_bytes))
        driver = Driver(executor, blocks_per_slot=4)
        prompt = Pass(segments=(driver.segment(0, 0, TOKENS[:-1], fresh=True),))
        driver.run(passes=(prompt,), admissions=(driver.admit(0, TOKENS),))
        found = []
        for place, token in enumerate([TOKENS[-1], 11, 12]):
            draft = driver.segment(0, len(TOKENS) - 1 + place, [token], outputs=LOGITS)
            passes = (Pass(segments=(draft,), role=ModelRole.DRAFT),)
            found.append(driver.run(passes=passes).passes[0][0].logits[0])
    finally:
        executor.close()
    with torch.no_grad():
        hidden = model.model(torch.tensor([TOKENS[:-1]])).last_hidden_state[0, -1]
        wanted = [
            head_logits(tensors, head, hidden, num_blocks=num_blocks).numpy() for head in range(3)
        ]
    np.testing.assert_allclose(np.stack(found), np.stack(wanted), atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "settings", "words", "kind"),
    [
        ({}, {"num_speculative_tokens": 4}, "3 heads, and num_speculative_tokens 4", SettingsError),
        ({}, {"num_speculative_tokens": 15, "draft_shape": "tree"}, "5 in a tree", SettingsError),
        ({"medusa_num_heads": None}, {}, "no medusa_num_heads", CorruptFileError),
        ({"truncated_vocab_size": 9}, {}, "truncated_vocab_size", UnsupportedModelError),
        ({"dflash_config": {}}, {}, "DFlash drafter", UnsupportedModelError),
        ({"medusa_num_layers": 2}, {}, r"0\.2\.weight", WeightsMismatchError),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_refused_in_one_sentence(
    tmp_path, target, config, settings, words, kind
):
    write_heads(tmp_path / "heads", head_tensors(*SIZES), **config)
    settings = engine_config(target[1], tmp_path / "heads", **settings)
    loaded = load_model(settings)
    with pytest.raises(kind, match=words):
        dict(load_draft(settings, loaded).weights.items())
