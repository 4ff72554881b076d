"""Layers that predict one token more: logits against transformers' own modules."""

import re

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.mtp import plain_logits, write_mtp
from tests.parity.every_case import CASES
from tests.parity.test_eagle3 import DRAFTED, EXECUTORS, TOKENS, own_logits

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError, UnsupportedModelError, WeightsMismatchError
from ridgeline.engine.loading import load_model
from ridgeline.engine.speculation import load_draft
from ridgeline.models import describe, describe_mtp

FAMILIES = (
    "deepseek_v3-groups", "deepseek_v3-yarn-biases", "glm4_moe-plain", "glm4_moe-groups",
    "glm4_moe_lite-plain", "mimo-plain",
)  # fmt: skip
_BY_ID = {case.id: case for case in CASES}


def engine_config(folder, executor="reference", **settings):
    return EngineConfig(
        model=str(folder), executor=executor, speculation="mtp", dtype="float32", **settings
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """transformers' model and layer of a case, and their folder."""
    known = {}

    def make(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = *write_mtp(_BY_ID[name], folder), folder
        return known[name]

    return make


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_modules(models, name, executor):
    main, mtp, folder = models(name)
    found = own_logits(engine_config(folder, executor), ((0, 5), (5, 11)))
    wanted = plain_logits(main, mtp, TOKENS, DRAFTED).numpy()
    assert wanted.std() > 1.0
    np.testing.assert_allclose(found, wanted, atol=3e-4, rtol=0)


def test_a_model_without_such_a_layer_is_refused_by_the_name_of_what_it_lacks(models, tmp_path):
    _, _, folder = models("mimo-plain")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for lacking, kind in (("input_proj", SettingsError), ("token_layernorm", WeightsMismatchError)):
        name = f"model.mtp_layers.0.{lacking}.weight"
        rest = {key: each for key, each in tensors.items() if key != name}
        save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
        loaded = load_model(engine_config(tmp_path))
        with pytest.raises(kind, match=lacking):
            dict(load_draft(engine_config(tmp_path), loaded).weights.items())


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("llama-plain", SettingsError, r"this llama has no model\.layers\.3\.eh_proj\.weight"),
        ("gpt2-plain", UnsupportedModelError, "gpt2 would have a layer more"),
        ("qwen3_next-biases", SettingsError, "mtp does not work .* qwen3_next, which keep states"),
    ],
    ids=str,
)
def test_families_that_have_none_are_refused_by_name(name, kind, words):
    case = _BY_ID[name]
    definition = describe(case.config | {"model_type": case.family})
    tensors = set() if kind is SettingsError else {"model.layers.3.eh_proj.weight"}
    with pytest.raises(kind, match=words):
        describe_mtp(definition, tensors)


def test_layers_that_a_config_says_are_there_may_be_left_over_and_no_others():
    config = _BY_ID["llama-plain"].config | {"model_type": "llama"}
    for count in (0, 1, 2):
        ignored = describe(config | {"num_nextn_predict_layers": count}).ignored
        found = [
            any(re.fullmatch(each, f"model.layers.{layer}.enorm.weight") for each in ignored)
            for layer in (2, 3, 4)
        ]
        assert found == [False, count > 0, count > 1]
