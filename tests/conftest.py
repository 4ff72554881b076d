"""A tiny model folder with a tokenizer of its own, in float64 so that equalities are exact.

What only some tests need is imported where it is needed: those of `make test-gpu` run on machines
that have little beside torch, triton, numpy and pytest.
"""

import json
import os
import shutil

import pytest
import torch

# So that what fakes and servers of tests assert is asserted under `python -O`, too.
pytest.register_assert_rewrite("tests")

from tests.tiny import CONFIG, tiny_model  # noqa: E402
from tests.user_folders import remove, use_own_folders  # noqa: E402

from ridgeline.kernels.gpu import missing_for_gpu  # noqa: E402

try:
    from hypothesis import settings
except ImportError:
    settings = None

# Tiny matrices: more threads only wait for each other. Inherited by subprocesses of tests, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# The same examples in every run, so that what fails, fails again; new ones are looked for with
# `--hypothesis-profile explore` (`make test-all`).
if settings is not None:
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("explore", max_examples=2000, deadline=None)
    settings.load_profile("repeatable")

_FOLDERS = use_own_folders(full=os.environ.get("RIDGELINE_TEST_FOLDERS") == "full")
NO_GPU = missing_for_gpu()
if NO_GPU is not None:  # before the first import of a Triton kernel
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_unconfigure():
    """Leaves nothing behind."""
    remove(_FOLDERS)


def pytest_collection_modifyitems(items):
    """Tests that are marked ``gpu`` say why they are skipped."""
    if NO_GPU is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB = 300


def write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 1,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny")
    config = CONFIG | {"vocab_size": VOCAB, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    model = tiny_model(config, dtype="float32", seed=2, gain=4.0)
    from ridgeline.kernels.tensors import as_tensor
    from ridgeline.models import describe

    sources = describe(config).sources
    save_file(
        {sources[name].name: as_tensor(value) for name, value in model.weights.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture(scope="session")
def damaged_folder(model_folder, tmp_path_factory):
    """The same model, with a weight that is not a number."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def counted(record_property):
    """``counted(1000)``: so many cases were tried; `make test-reliability` adds them up."""
    return lambda count: record_property("counted", count)


@pytest.fixture(scope="session")
def llm(model_folder):
    from ridgeline import LLM

    with LLM(str(model_folder), dtype="float64", block_tokens=4, max_num_seqs=8) as llm:
        yield llm
