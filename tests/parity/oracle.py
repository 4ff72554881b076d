"""Checkpoints made by transformers, every parameter random, and what transformers computes."""

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tests.parity.cases import Case
from tests.parity.routers import RouterWatch, random_sparse

DECODED = 32
_UNIT_OFFSET = (
    "gemma", "gemma2", "gemma3_text", "gemma3", "nemotron", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "qwen3_5_moe", "vaultgemma",
)  # fmt: skip
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
_TIED = (
    "gemma", "gemma2", "gemma3_text", "gemma3", "gemma3n_text", "gemma4_text", "gemma4", "cohere",
    "cohere2",
    "ernie4_5", "ernie4_5_moe", "gpt2", "granite_swa", "lfm2", "lfm2_moe", "smollm3", "starcoder2",
    "vaultgemma", "youtu",
)  # fmt: skip
_FORGETS_LENGTH = ("bamba",)  # of its cache: tokens are at 0 unless positions are given
# Types that transformers does not know by their name.
_SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 14}
_SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN_TOWER = _TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
_VISION = {
    "gemma3": _TOWER | _SMALL,
    "gemma4": _TOWER | _SMALL,
    "mistral3": _TOWER | _SMALL | {"model_type": "pixtral", "head_dim": 8},
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
    "qwen2_5_vl": _QWEN_TOWER | {"fullatt_block_indexes": [0]},
    "qwen3_vl": _QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    "qwen3_5_moe": _QWEN_TOWER,
}


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """``logits``: float32 ``[prompt + DECODED, V]``, the prompt's in one pass, then one by one.

    ``token_ids`` are the tokens that went in: the prompt, and then the most likely token that had
    not come yet (random models soon repeat themselves). ``greedy`` is the true greedy output, as
    tokens and float32 ``[DECODED, V]`` logits.
    """

    folder: Path
    prompt: list[int]
    token_ids: list[int]
    logits: np.ndarray
    greedy_token_ids: list[int]
    greedy_logits: np.ndarray


@torch.no_grad()
def make_oracle(case: Case, folder: Path) -> Oracle:
    """Write a checkpoint, and run it in transformers with its own cache and eager attention."""
    model = _model(case).eval()
    seed = len(case.id) * 1009 + sum(map(ord, case.id)) + case.seed * 100_003
    generator = torch.Generator().manual_seed(seed)
    rope_dim = case.config.get("qk_rope_head_dim", 0)
    saved_buffers = [each for each in model.named_buffers() if each[0] in model.state_dict()]
    for name, parameter in [*model.named_parameters(), *saved_buffers]:
        values = random_sparse(name, parameter.shape, generator, rope_dim)
        parameter.copy_(_random(name, parameter, generator, case) if values is None else values)
    model.save_pretrained(folder)
    if case.family in _SAME_AS:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": case.family}))
    vocab_size = case.config["vocab_size"]
    prompt = torch.randint(vocab_size, (case.prompt_tokens,), generator=generator).tolist()
    # Two copies: with dynamic rope a model remembers its longest sequence.
    first = copy.deepcopy(model)
    watches = [RouterWatch(first), RouterWatch(model)]
    token_ids, logits = _decode(first, prompt, repeats=False)
    greedy_token_ids, greedy_logits = _decode(model, prompt, repeats=True)
    for watch in watches:
        watch.close()
    return Oracle(
        folder=folder,
        prompt=prompt,
        token_ids=token_ids,
        logits=logits,
        greedy_token_ids=greedy_token_ids[len(prompt) :],
        greedy_logits=greedy_logits[len(prompt) - 1 : -1],
    )


def _decode(
    model: torch.nn.Module, prompt: list[int], *, repeats: bool
) -> tuple[list[int], np.ndarray]:
    """The prompt, then `DECODED` likely tokens one by one; tokens and logits of all of them."""
    token_ids = list(prompt)
    out = model(torch.tensor([prompt]), use_cache=True, output_attentions=True)
    _check_is_telling(out)
    logits = [out.logits[0]]
    for _ in range(DECODED):
        scores = logits[-1][-1].clone()
        if not repeats:
            scores[token_ids[len(prompt) :]] = -torch.inf
        token_ids.append(int(scores.argmax()))
        name = "cache_params" if hasattr(out, "cache_params") else "past_key_values"
        cache = {name: getattr(out, name)}
        if model.config.model_type in _FORGETS_LENGTH:
            cache["position_ids"] = torch.tensor([[len(token_ids) - 1]])
        out = model(torch.tensor([token_ids[-1:]]), use_cache=True, **cache)
        logits.append(out.logits[0])
    return token_ids, torch.cat(logits).numpy()


def _model(case: Case) -> torch.nn.Module:
    """transformers' own class for the family, with attention that tells its weights."""
    if "text_config" in case.changes:
        text = {"model_type": _TEXT_TYPES.get(case.family), **case.changes["text_config"]}
        config = transformers.AutoConfig.for_model(
            case.family, text_config=text, vision_config=_VISION[case.family]
        )
        return transformers.AutoModelForImageTextToText.from_config(
            config, attn_implementation="eager"
        )
    config = transformers.AutoConfig.for_model(
        _SAME_AS.get(case.family, case.family), **case.config
    )
    if case.family == "mistral4":  # which AutoModelForCausalLM does not know
        return transformers.Mistral4ForCausalLM._from_config(config, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _random(
    name: str, parameter: torch.Tensor, generator: torch.Generator, case: Case
) -> torch.Tensor:
    """Gains for telling logits: scores of standard deviation 2, far from uniform attention."""
    shape = parameter.shape
    tied = case.config.get("tie_word_embeddings", case.family in _TIED)
    if ("norm" in name or "ln_" in name) and name.endswith("weight"):
        low, high = (1.1, 2.0) if any(part in name for part in _HEAD_NORMS) else (0.6, 1.6)
        values = low + (high - low) * torch.rand(shape, generator=generator)
        if tied and name.endswith(("model.norm.weight", "embedding_norm.weight", "ln_f.weight")):
            values *= 2.0  # makes up for the small embeddings
        has_offset = case.family in _UNIT_OFFSET and "linear_attn" not in name
        return values - 1.0 if has_offset else values
    if ".act_fn." in name:
        return 0.5 * torch.randn(shape, generator=generator)
    if name.endswith("layer_scalar"):
        return 0.6 + torch.rand(shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return values * 0.5
    if any(part in name for part in ("embed_tokens", "embed_in", "wte", "wpe")):
        return values * (0.2 if tied else 1.0)
    if name.endswith("modality_router.weight"):  # whose input is divided by the width
        return values * math.sqrt(shape[-1])
    projections = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn")
    queries = any(part in name for part in projections)
    gain = 3.0 if "lm_head" in name or "embed_out" in name else 1.5 if queries else 1.1
    fan_in = shape[0] if case.family == "gpt2" else shape[-1]
    return values * gain / math.sqrt(fan_in) if len(shape) > 1 else values


def _check_is_telling(out) -> None:
    """Assert that a wrong result would show: logits vary, and attention is far from uniform."""
    assert out.logits.std() >= 1.0
    for weights in getattr(out, "attentions", None) or ():  # there may be no attention
        rows = weights[0, :, 8:].double()  # [H, queries, keys]
        entropy = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
        seen = (rows > 0).sum(-1).double()
        several = seen > 1  # the first token of a chunk sees itself alone
        assert (entropy[several] / seen[several].log()).mean() < 0.85
