"""Pairs of a tiny target and a draft that often agrees with it, on every executor there is.

On the reference and the cuda executor they run in float64, so that a token differs only where
something is wrong; the others promise equality in the type that they run in.
"""

import json
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import VOCAB, write_tokenizer
from tests.eagle3 import head_config, head_tensors, write_head
from tests.executors.host_cuda import host_factory
from tests.medusa import head_tensors as head_tensors_of_medusa
from tests.medusa import write_heads
from tests.tiny import CONFIG, LATENT, WINDOWED, tiny_model

from ridgeline import LLM, SamplingParams
from ridgeline.core.plan import ModelRole
from ridgeline.core.settings.speculation import (
    DRAFT_MODEL_SPECULATION,
    HEAD_SPECULATION,
    Speculation,
    drafter_names,
)
from ridgeline.decoding.drafters.budget import Budget
from ridgeline.decoding.drafters.control import StepCosts
from ridgeline.executors import registry
from ridgeline.executors.cuda.traits import TRAITS
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import describe
from ridgeline.scheduler import Speculation as Speculating

CHAINS = drafter_names()  # those of installed packages, too
DRAFTERS = (*CHAINS, *(f"{name} tree" for name in get_args(Speculation) if name != "off"))
# What combined and adaptive draft with in place of a draft model.
DRAFTERS_WITH_HEADS = tuple(
    f"{name} with {head}{shape}"
    for name in ("combined", "adaptive")
    for head in ("eagle3", "mtp")
    for shape in ("", " tree")
)
PREDICTION = "prediction"
# Those that also look in what a request says that its output will be.
DRAFTERS_WITH_PREDICTION = tuple(
    f"{name} with {PREDICTION}{shape}"
    for name in ("ngram", "suffix", "combined", "adaptive")
    for shape in ("", " tree")
)
# The CUDA executor runs on the CPU here, op by op as on a GPU.
EXECUTOR_NAMES = ("reference", "cpu", "cuda")
EXECUTORS = [*EXECUTOR_NAMES[:2], pytest.param("cuda", marks=pytest.mark.slow)]
_LAYER_AHEAD = f"model.layers.{CONFIG['num_hidden_layers']}."
_DISAGREEMENT = 0.05  # noise on the draft's weights, relative to their own spread


def _write(folder, config, *, noise=0.0):
    """With a layer behind the last that predicts one token more, as its first one would."""
    folder.mkdir()
    config = config | {"vocab_size": VOCAB, "architectures": ["LlamaForCausalLM"]}
    config |= {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    model = tiny_model(config, dtype="float32", gain=4.0)
    generator = torch.Generator().manual_seed(1)
    sources = describe(config).sources
    tensors = {}
    for name, value in model.weights.items():
        change = torch.randn(value.shape, generator=generator) * float(value.std()) * noise
        tensors[sources[name].name] = (as_tensor(value) + change).contiguous()
    hidden, first, last = config["hidden_size"], "model.layers.0.", _LAYER_AHEAD
    tensors |= {
        name.replace(first, last): each.clone()
        for name, each in tensors.items()
        if name.startswith(first)
    }
    own = 0.01 * torch.randn(hidden, hidden, generator=generator)
    tensors |= {
        f"{last}enorm.weight": torch.full((hidden,), 0.02),  # as small as embeddings are
        f"{last}hnorm.weight": torch.ones(hidden),
        f"{last}eh_proj.weight": torch.cat([torch.eye(hidden), own], dim=-1),
        f"{last}shared_head.norm.weight": torch.ones(hidden),
    }
    save_file(tensors, folder / "model.safetensors")


def _write_adapter(folder):
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    rank, hidden = 3, CONFIG["hidden_size"]
    settings = {"r": rank, "lora_alpha": 12, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")


def _write_drafter(folder, target, target_config):
    """A drafter of the tokens that the model says most often, so that it is right sometimes."""
    with LLM(str(target), executor="reference", dtype="float64", block_tokens=4) as llm:
        settings = SamplingParams(temperature=0.4, seed=3, max_tokens=24, n=3)
        outputs = llm.generate(["a", "the cat sat on the mat ", "na"], settings)
    said = Counter(
        token for output in outputs for each in output.outputs for token in each.token_ids
    )
    config = head_config(target_config | {"vocab_size": VOCAB}, draft_vocab_size=8)
    tensors = head_tensors(config, gain=1.0)
    often = torch.tensor(sorted(token for token, _ in said.most_common(8)))
    write_head(folder, config, tensors | {"d2t": often - torch.arange(8)})


def _write_heads(folder, target):
    """Heads that guess what the model's own does, which is right where it repeats itself."""
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    tensors = head_tensors_of_medusa(head.shape[1], VOCAB, num_heads=4, gain=0.0)
    write_heads(
        folder,
        {
            name: head.clone() if name.endswith(".1.weight") else 0.1 * each
            for name, each in tensors.items()
        },
        num_heads=4,
    )


def write_pairs(root):
    """The folders ``full``, ``windowed``, ``latent``, their drafts and drafters that read hidden
    states, and an adapter of ``full``."""
    dense = LATENT | {"first_k_dense_replace": LATENT["num_hidden_layers"]}
    for name, config in (("full", CONFIG), ("windowed", WINDOWED), ("latent", dense)):
        _write(root / name, config)
        _write(root / f"{name}-draft", config, noise=_DISAGREEMENT)
        _write_drafter(root / f"{name}-eagle3", root / name, config)
        _write_heads(root / f"{name}-medusa", root / name)
    _write_adapter(root / "adapter")


def drafting_settings(name):
    """Of a drafter's name, what it drafts with if that is not usual, and the shape of its drafts
    if that is no chain."""
    speculation, _, head = name.removesuffix(" tree").partition(" with ")
    is_head = head and head != PREDICTION
    settings = {"speculation": speculation} | ({"draft_model": head} if is_head else {})
    return settings | ({"draft_shape": "tree"} if name.endswith(" tree") else {})


def opener(root, executor):
    """Opens engines on a pair: ``open_llm(speculation, pair="full", **settings)``.

    ``speculation`` may be a drafter's name and the shape of its drafts.

    ``pool_tokens``: how many tokens the KV pool of each model holds.
    """
    block_tokens = 16 if executor == "cpu" else 4
    known: dict[tuple[str, str], int] = {}  # bytes of a block, all groups together, by pair

    def open_llm(speculation, *, pair="full", pool_tokens=None, **settings):
        if executor != "cpu":
            settings = {"dtype": "float64"} | settings
        models = 1
        drafting = drafting_settings(speculation)
        drafts_with = drafting.get("draft_model", drafting["speculation"])
        has_head = drafts_with in HEAD_SPECULATION
        if executor == "cuda" and (has_head or drafts_with == "exit"):
            pytest.skip("the cuda executor refuses what uses the target's KV to draft")
        if drafts_with in DRAFT_MODEL_SPECULATION:
            models = 2
            drafting["draft_model"] = str(root / f"{pair}-draft")
        elif drafts_with in ("eagle3", "medusa"):
            drafting["draft_model"] = str(root / f"{pair}-{drafts_with}")
        settings = drafting | settings
        settings = {"block_tokens": block_tokens, "max_num_seqs": 16} | settings
        if pool_tokens is not None:
            holder = speculation if has_head else "off"
            if (pair, holder) not in known:
                with open_llm(holder, pair=pair) as llm:
                    known[pair, holder] = sum(llm._engine.executor.kv_layout().block_bytes)
            blocks = pool_tokens // block_tokens
            settings["kv_cache_memory_bytes"] = blocks * known[pair, holder] * models
        return LLM(str(root / pair), executor=executor, **settings)

    return open_llm


def draft_on_tiny_models(patch):
    """Drafts cost more than they gain here, which the adaptive drafter would find out."""
    patch.setattr(Budget, "rest_steps", lambda _: 0)
    patch.setattr(StepCosts, "excess_s", lambda self, _: [0.0] * (self._max_tokens + 1))


@pytest.fixture(autouse=True)
def _adaptive_drafts(monkeypatch):
    draft_on_tiny_models(monkeypatch)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    write_pairs(root)
    return root


@pytest.fixture(scope="session", params=EXECUTORS)
def executor(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._TRAITS, "cuda", replace(TRAITS, create=host_factory))
        yield request.param


@pytest.fixture(scope="session")
def open_llm(pairs, executor):
    return opener(pairs, executor)


@pytest.fixture
def proposals(monkeypatch):
    """Tokens at each position that was drafted from, of all steps, by the slot."""
    found = []
    plain = Speculating.note_drafts

    def note(self, plan, result):
        for a_pass, outcomes in zip(plan.passes, result.passes, strict=True):
            for segment, outcome in zip(a_pass.segments, outcomes, strict=True):
                if a_pass.role is ModelRole.DRAFT and segment.outputs.sample:
                    found.append((segment.stop, outcome.token_ids))
        plain(self, plan, result)

    monkeypatch.setattr(Speculating, "note_drafts", note)
    return found
