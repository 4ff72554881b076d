"""The registry, `describe`'s treatment of unknown keys, and where tensors are."""

import logging

import pytest

import ridgeline.models
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models import PRESETS, describe, lower, model_types
from ridgeline.models.registry import _FAMILIES, _family

LLAMA = dict(PRESETS["llama-3.2-1b"])


def test_public_names():
    for name in ridgeline.models.__all__:
        assert hasattr(ridgeline.models, name)


def test_every_file_of_the_task_is_a_family():
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3"} <= set(
        model_types()
    )


def test_a_model_type_leads_to_its_own_family():
    assert len(_FAMILIES) > 80
    for model_type in _FAMILIES:
        family = _family(model_type)
        assert family is not None and family.model_type == model_type


@pytest.mark.parametrize("model_type", ["mamba", "", "llama\n", "x" * 1000])
def test_unknown_model_type(model_type):
    with pytest.raises(UnsupportedModelError, match=r"`ridgeline collect-env` lists") as caught:
        describe(LLAMA | {"model_type": model_type})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"dflash_config": {"mask_token_id": 1}}, {"architectures": ["DFlashDraftModel"]}]
)
def test_drafters_of_blocks_are_no_models(changes):
    with pytest.raises(UnsupportedModelError, match="DFlash drafter, which drafts a block"):
        describe(LLAMA | changes)


@pytest.mark.parametrize("model_type", [None, 3, ["llama"]])
def test_bad_model_type(model_type):
    with pytest.raises(CorruptFileError, match="model_type"):
        describe(LLAMA | {"model_type": model_type})


def test_unknown_keys_are_one_warning(caplog):
    config = LLAMA | {"frobnicate": 1, "rope_scaling": LLAMA["rope_scaling"] | {"wobble": 2}}
    with caplog.at_level(logging.WARNING):
        describe(config)
    (record,) = caplog.records
    assert "frobnicate" in record.getMessage()
    assert "rope_scaling.wobble" in record.getMessage()
    with pytest.raises(UnsupportedModelError, match="frobnicate"):
        describe(config, strict=True)


def test_many_unknown_keys_are_a_short_warning(caplog):
    describe(LLAMA | {f"key_{i}": i for i in range(1000)})
    (record,) = caplog.records
    assert "and 988 more" in record.getMessage()


def test_inert_keys_are_silent(caplog):
    inert = {
        "architectures": ["LlamaForCausalLM"],
        "transformers_version": "4.45.0",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "quantization_config": None,
    }
    describe(LLAMA | inert, strict=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_declared_dtype(changes, dtype):
    assert describe(LLAMA | changes).dtype == dtype


def test_sources():
    definition = describe(LLAMA)
    sources = definition.sources
    assert sources["layers.11.q"].name == "model.layers.11.self_attn.q_proj.weight"
    assert sources["layers.0.mlp_norm"].name == "model.layers.0.post_attention_layernorm.weight"
    assert sources["embed"].name == "model.embed_tokens.weight"
    assert "layers.16.q" not in sources
    gemma = describe(PRESETS["gemma-2-2b"]).sources
    assert gemma["layers.0.mlp_norm"].name == "model.layers.0.pre_feedforward_layernorm.weight"
    assert (
        gemma["layers.0.attention_post_norm"].name
        == "model.layers.0.post_attention_layernorm.weight"
    )


def test_checkpoints_of_models_without_a_head_have_no_prefix():
    assert describe(LLAMA).sources["layers.1.q"].other_names == (
        "layers.1.self_attn.q_proj.weight",
    )
    query = describe(PRESETS["deepseek-v2-lite"]).sources["layers.1.q"]
    assert "layers.1.self_attn.q_proj.weight" in query.other_names


def test_only_a_tied_head_may_be_left_over():
    assert describe(LLAMA).sources["embed"].copies == ("lm_head.weight",)
    untied = describe(LLAMA | {"tie_word_embeddings": False})
    assert untied.sources["embed"].copies == ()
    assert lower(untied.spec)[-1].weight.name == "head"
