"""Drafters that read the target's features: logits against a plain forward, features of
transformers' target."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.eagle3 import Drafter, head_config, head_tensors, write_head
from tests.tiny import CONFIG, Driver
from transformers import LlamaConfig, LlamaForCausalLM

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import CorruptFileError, SettingsError, UnsupportedModelError
from ridgeline.core.plan import ModelRole, Outputs, Pass
from ridgeline.engine.loading import load_model
from ridgeline.engine.speculation import load_draft, with_draft
from ridgeline.executors import create_executor
from ridgeline.kernels.cpu.library import native_kernels_run

EXECUTORS = [
    "reference",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not native_kernels_run(), reason="the kernels are not built"),
    ),
]
TOKENS = [5, 17, 150, 2, 2, 99, 31, 64, 7, 120, 45, 3]
DRAFTED = [11, 12]
LOGITS = Outputs(logits=True)
QWEN = {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": False}
CASES = {
    "the authors' form": {"draft_vocab_size": 60},
    "its own embedding": {"own_embedding": True},
    "the package's form": {"draft_vocab_size": 60, "speculators": True},
    "norms": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "two layers of Qwen 3": {"layer": QWEN, "speculators": True},
    "more layers of the target": {"feature_layers": (0, 1, 2, 2)},
}


def engine_config(folder, head, executor, **settings):
    return EngineConfig(
        model=str(folder), executor=executor, speculation="eagle3", draft_model=str(head),
        dtype="float32", **settings,
    )  # fmt: skip


def own_logits(config, chunks):
    """Logits of the drafter: prompts in chunks, and then of drafts that it is told, one by one."""
    loaded = load_model(config)
    models = with_draft(loaded.model, load_draft(config, loaded))
    executor = create_executor(models, config)
    try:
        executor.allocate_kv([4] * len(executor.kv_layout().block_bytes))
        driver, rows = Driver(executor, blocks_per_slot=4), []
        admissions = (driver.admit(0, TOKENS),)
        for first, last in chunks:
            prompt = driver.segment(0, first, TOKENS[first:last], fresh=not first)
            draft = driver.segment(0, first + 1, TOKENS[first + 1 : last + 1], outputs=LOGITS)
            passes = (Pass(segments=(prompt,)), Pass(segments=(draft,), role=ModelRole.DRAFT))
            result = driver.run(passes=passes, admissions=admissions)
            rows.append(result.passes[1][0].logits)
            admissions = ()
        for place, token in enumerate(DRAFTED):
            draft = driver.segment(0, len(TOKENS) + place, [token], outputs=LOGITS)
            passes = (Pass(segments=(draft,), role=ModelRole.DRAFT),)
            rows.append(driver.run(passes=passes).passes[0][0].logits)
        return np.concatenate(rows)
    finally:
        executor.close()


def expected_logits(model, config, tensors):
    """Those of a plain forward, as the target's tokens: −∞ of those that the drafter lacks."""
    with torch.no_grad():
        out = model(torch.tensor([TOKENS[:-1]]), output_hidden_states=True)
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        features = torch.cat([out.hidden_states[layer][0] for layer in layers], dim=-1)
        drafter = Drafter(config, tensors, model.model.embed_tokens.weight)
        rows, tokens = drafter.project(features), TOKENS[1:]
        logits, own = drafter.logits(tokens, rows)
        for token in DRAFTED:
            rows, tokens = torch.cat([rows, own[-1:]]), [*tokens, token]
            logits, own = drafter.logits(tokens, rows)
    whole = np.full((len(tokens), CONFIG["vocab_size"]), -np.inf, dtype=np.float32)
    whole[:, (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).numpy()] = logits.numpy()
    return whole


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_drafter_are_those_of_a_plain_forward(tmp_path, target, executor, case):
    model, folder = target
    settings = dict(CASES[case])
    form = {name: settings.pop(name) for name in ("speculators",) if name in settings}
    own = {name: settings.pop(name) for name in ("own_embedding",) if name in settings}
    config = head_config(CONFIG, **settings)
    tensors = head_tensors(config, **own)
    write_head(tmp_path / "head", config, tensors, **form)
    chunks = ((0, 5), (5, 11))  # the last token's features come with its successor
    found = own_logits(engine_config(folder, tmp_path / "head", executor), chunks)
    wanted = expected_logits(model, config, tensors)
    assert np.array_equal(np.isinf(found), np.isinf(wanted))
    np.testing.assert_allclose(found, wanted, atol=3e-4, rtol=0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_drafter_without_a_head_has_that_of_its_target_which_may_be_tied(tmp_path, executor):
    tied = CONFIG | {"tie_word_embeddings": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**tied)).eval()
    model.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(tied))
    config = head_config(tied)
    tensors = head_tensors(config) | {"lm_head.weight": model.lm_head.weight.detach().clone()}
    own = {name: each for name, each in tensors.items() if name != "lm_head.weight"}
    write_head(tmp_path / "head", config, own)
    settings = engine_config(tmp_path / "target", tmp_path / "head", executor)
    found = own_logits(settings, ((0, 5), (5, 11)))
    np.testing.assert_allclose(found, expected_logits(model, config, tensors), atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "words", "kind"),
    [
        ({"vocab_size": 200}, "made for 200 tokens", SettingsError),
        ({"target_hidden_size": 64}, "hidden states of 64", SettingsError),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 9]}}, "0, 9", SettingsError),
        ({"model_type": "gemma2"}, "supported are llama and qwen3", UnsupportedModelError),
        ({"speculators_model_type": "peagle"}, "eagle3 is supported", UnsupportedModelError),
        ({"speculators_model_type": "dspark"}, "DFlash drafter", UnsupportedModelError),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "DFlash drafter", UnsupportedModelError),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash drafter", UnsupportedModelError),
        ({"fc_norm": True}, "fc_norm", UnsupportedModelError),
    ],
    ids=str,
)
def test_a_drafter_of_another_model_is_refused_in_one_sentence(
    tmp_path, target, change, words, kind
):
    config = head_config(CONFIG)
    write_head(tmp_path / "head", config | change, head_tensors(config))
    settings = engine_config(target[1], tmp_path / "head", "reference")
    loaded = load_model(settings)
    with pytest.raises(kind, match=words):
        load_draft(settings, loaded)


@pytest.mark.parametrize("twice", [False, True])
def test_a_map_of_tokens_that_is_none_is_refused(tmp_path, target, twice):
    config = head_config(CONFIG, draft_vocab_size=60)
    tensors = head_tensors(config)
    tensors["d2t"][-1] = tensors["d2t"][-2] - 1 if twice else 500
    write_head(tmp_path / "head", config, tensors, speculators=True)
    settings = engine_config(target[1], tmp_path / "head", "reference")
    loaded = load_model(settings)
    with pytest.raises(CorruptFileError, match="d2t"):
        load_draft(settings, loaded)


def test_a_drafter_needs_a_name_and_a_folder_of_its_kind(target):
    settings = engine_config(target[1], target[1], "reference")
    loaded = load_model(settings)
    with pytest.raises(SettingsError, match="needs draft_model, a drafter of this model"):
        load_draft(replace(settings, draft_model=None), loaded)
    with pytest.raises(UnsupportedModelError, match=r"no fc\.weight"):
        load_draft(settings, loaded)
