"""What a checkpoint's files make of hidden states, and who is asked for what it does not do."""

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.parity.encoder_cases import ENCODER_CASES, make_model, random_texts

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    ContextLengthError,
    CorruptFileError,
    InvalidRequestError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from ridgeline.core.pooling import Pooling, Squash
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.llm import LLM
from ridgeline.models import describe, read_config
from ridgeline.models.pooling import read_pooling

BERT = ENCODER_CASES[0]
TEXTS = random_texts(5, seed=1)
PREFIX = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path):
    """An encoder as sentence-transformers saves it: mean, a dense layer, length 1, prompts."""
    make_model(BERT, tmp_path)
    generator = torch.Generator().manual_seed(4)
    weights = {
        "linear.weight": torch.randn(20, 64, generator=generator),
        "linear.bias": torch.randn(20, generator=generator),
    }
    for name, values in {
        "modules.json": [
            {"idx": 0, "path": "", "type": f"{PREFIX}.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": f"{PREFIX}.Pooling"},
            {"idx": 2, "path": "2_Dense", "type": f"{PREFIX}.Dense"},
            {"idx": 3, "path": "3_Normalize", "type": f"{PREFIX}.Normalize"},
        ],
        "1_Pooling/config.json": {
            "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False,
        },
        "2_Dense/config.json": {
            "in_features": 64, "out_features": 20, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "ab: ", "document": "cd "}, "default_prompt_name": None,
        },
    }.items():  # fmt: skip
        write(tmp_path, name, values)
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    return tmp_path


def write(folder, name, values):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def pooling_of(folder):
    return read_pooling(folder, describe(read_config(folder)).spec)


def test_modules_are_applied_in_their_order(folder):
    from transformers import BertModel

    with LLM(str(folder)) as llm:
        assert llm.config.max_model_len == 40
        found = llm.embed(TEXTS, truncate=-1)
        short = llm.embed(TEXTS, truncate=-1, dimensions=8)
        queries = llm.embed(TEXTS, prompt_name="query", truncate=-1)
        ids = [llm.tokenizer.encode_cut(text, 40) for text in TEXTS]
        written = llm.embed([f"ab: {text}" for text in TEXTS], truncate=-1)
        scores = llm.score(TEXTS[0], TEXTS, truncate=-1)
        documents = llm.embed([f"cd {text}" for text in TEXTS], truncate=-1)
        with pytest.raises(InvalidRequestError, match="no prompt 'other'; it has: query, document"):
            llm.embed("a", prompt_name="other")
        with pytest.raises(InvalidRequestError, match="dimensions may be 20"):
            llm.embed("a", dimensions=21)
    model = BertModel.from_pretrained(folder).eval()
    dense = torch.nn.Linear(64, 20)
    from safetensors.torch import load_file

    weights = load_file(folder / "2_Dense" / "model.safetensors")
    dense.load_state_dict({name.removeprefix("linear."): each for name, each in weights.items()})
    with torch.no_grad():
        expected = [
            torch.nn.functional.normalize(
                torch.tanh(dense(model(torch.tensor([row])).last_hidden_state.mean(1))), dim=-1
            )[0]
            for row in ids
        ]
    assert np.abs(found - torch.stack(expected).numpy()).max() <= 1e-5
    cut = found[:, :8] / np.linalg.norm(found[:, :8], axis=1, keepdims=True)
    assert np.abs(short - cut).max() <= 1e-6
    np.testing.assert_array_equal(queries, written)
    assert scores == pytest.approx(documents @ written[0], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("modules.json", [{"path": "", "type": f"{PREFIX}.CLIPModel"}], "begins with 'CLIPModel'"),
        (
            "modules.json",
            [{"path": "", "type": f"{PREFIX}.Transformer"}, {"path": "1", "type": "x.CNN"}],
            "'CNN'",
        ),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"cls\+mean pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_pro"),
        ("2_Dense/config.json", {"out_features": 20, "activation_function": "a.Mish"}, "Mish"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(folder, name, values, message):
    write(folder, name, values)
    with LLM(str(folder)) as llm, pytest.raises(UnsupportedModelError, match=message):
        llm.embed("ab")


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "Dense", "Pooling"),
        ("Transformer", "Pooling", "Pooling"),
        ("Transformer", "Normalize"),
        ("Transformer",),
        (),
    ],
)
def test_modules_in_an_order_of_another_vector_are_refused(folder, kinds):
    paths = {"Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": paths.get(kind, ""), "type": f"{PREFIX}.{kind}"} for kind in kinds]
    write(folder, "modules.json", modules)
    assert "order" in pooling_of(folder).refusal


def test_prompts_and_limits_count_without_a_list_of_modules(folder):
    (folder / "modules.json").unlink()
    found = pooling_of(folder)
    assert found.prompts == {"query": "ab: ", "document": "cd "}
    assert found.max_tokens == 40
    write(folder, "config_sentence_transformers.json", {"prompts": {"query": 5}})
    with pytest.raises(CorruptFileError, match="no text"):
        pooling_of(folder)
    write(folder, "config_sentence_transformers.json", {"default_prompt_name": "other"})
    with pytest.raises(CorruptFileError, match="no prompt 'other', its default"):
        pooling_of(folder)


def test_texts_are_lower_case_where_the_checkpoint_says_so(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    write(folder, "tokenizer.json", tokenizer)
    with LLM(str(folder)) as llm:
        lower, upper = llm.embed(["ab cd", "AB cd"], truncate=-1)
    assert np.abs(lower - upper).max() > 1e-3
    write(folder, "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": True})
    with LLM(str(folder)) as llm:
        np.testing.assert_array_equal(llm.embed("AB cd", truncate=-1)[0], lower)


def test_arguments_of_another_kind_are_one_error_each(folder):
    with LLM(str(folder)) as llm:
        assert llm.embed([]).shape == (0, 20)
        assert llm.embed([], dimensions=3).shape == (0, 3)
        for options in ({"truncate": "5"}, {"truncate": 3.5}, {"dimensions": 2.5}):
            with pytest.raises(InvalidRequestError):
                llm.embed(["ab"], **options)
        with pytest.raises(InvalidRequestError, match="string or a list of token ids"):
            llm.embed([b"a"], truncate=4)
        for top_n in (0, -1, True):
            with pytest.raises(InvalidRequestError, match="top_n"):
                llm.rerank("ab", ["cd", "ef"], top_n=top_n)


def test_files_that_contradict_themselves(folder):
    write(folder, "2_Dense/config.json", {"out_features": 21, "bias": True})
    with pytest.raises(WeightsMismatchError, match="does not fit 64 inputs and 21 outputs"):
        LLM(str(folder))
    weights = {"linear.weight": torch.ones(20, 32), "linear.bias": torch.ones(20)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    write(folder, "2_Dense/config.json", {"out_features": 20, "bias": True})
    with pytest.raises(WeightsMismatchError, match="does not fit 64 inputs"):
        LLM(str(folder))
    outside = {"path": "../2_Dense", "type": f"{PREFIX}.Dense"}
    write(folder, "modules.json", [{"path": "", "type": f"{PREFIX}.Transformer"}, outside])
    with pytest.raises(CorruptFileError, match="not below"):
        LLM(str(folder))
    write(folder, "modules.json", {"modules": []})
    with pytest.raises(CorruptFileError, match="no list of modules"):
        LLM(str(folder))


def test_how_scores_are_squashed(tmp_path):
    make_model(BERT, tmp_path, suffix="ForSequenceClassification", num_labels=1)
    assert pooling_of(tmp_path).score is Squash.SIGMOID
    write(tmp_path, "config_sentence_transformers.json", {"activation_fn": "torch.nn.Identity"})
    assert pooling_of(tmp_path).score is Squash.IDENTITY
    assert pooling_of(tmp_path).pooling is Pooling.CLS
    write(tmp_path, "config_sentence_transformers.json", {"activation_fn": "torch.nn.Mish"})
    assert "Mish" in pooling_of(tmp_path).refusal


def test_each_is_asked_for_what_it_does(folder, model_folder, tmp_path_factory):
    with LLM(str(folder)) as llm, pytest.raises(UnsupportedModelError, match="not generate text"):
        llm.generate("ab")
    with LLM(str(model_folder)) as llm:
        with pytest.raises(UnsupportedModelError, match="neither a reranker"):
            llm.rerank("the cat", ["the mat"])
        assert llm.embed("the cat").shape == (1, llm.spec.hidden_size)
    reranker = tmp_path_factory.mktemp("reranker")
    make_model(BERT, reranker, suffix="ForSequenceClassification", num_labels=3)
    with LLM(str(reranker)) as llm:
        with pytest.raises(UnsupportedModelError, match="makes no embeddings"):
            llm.embed("ab")
        with pytest.raises(UnsupportedModelError, match="3 classes"):
            llm.score("ab", "cd")


def test_an_encoder_serves_from_a_process_of_its_own(folder):
    async def main():
        async with AsyncEngine(EngineConfig(model=str(folder))) as engine:
            return await engine.embed("ab cd", request_id="one")

    with LLM(str(folder)) as llm:
        np.testing.assert_array_equal(asyncio.run(main()).vector, llm.embed("ab cd")[0])


def test_long_texts_are_cut_when_that_is_asked_for(tmp_path):
    model = make_model(BERT, tmp_path, suffix="ForSequenceClassification", num_labels=1)
    del model
    long = "ab cd " * 200
    with LLM(str(tmp_path), max_num_batched_tokens=32) as llm:
        with pytest.raises(ContextLengthError, match="context holds 128"):
            llm.score("ab", long)
        assert len(llm.score("ab", [long, "ef"], truncate=-1)) == 2  # longer than a step
        backend = llm.tokenizer._backend
        for limit in (7, 20, 33):
            backend.enable_truncation(limit, strategy="longest_first")
            for pair in ((long, "ab cd"), ("ab cd", long), (long, long), (long[:60], long)):
                theirs = backend.encode(*pair)
                backend.no_truncation()
                ours = llm.tokenizer.encode_pair(*pair, limit)
                backend.enable_truncation(limit, strategy="longest_first")
                assert ours == (theirs.ids, theirs.type_ids.index(1))
            backend.no_truncation()
        with pytest.raises(InvalidRequestError, match="leave no room"):
            llm.score("ab", "cd", truncate=3)
