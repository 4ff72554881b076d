"""A small EAGLE-3 drafter of the embedded model: ``python -m recipes.eagle3 FOLDER``.

Trained on what the model says itself, from its first token on, by training-time test (arXiv
2503.01840, section 3.2): each row goes on with its own states for some steps, as it does when it
drafts. It has the most frequent tokens of these texts, and the model's embedding.

Shapes: T positions, D hidden, W = 3·D features, R rows of the drafter's head, H heads, d width.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from ridgeline import LLM, SamplingParams
from ridgeline.models import read_config
from ridgeline.weights import locate_model

FEATURE_LAYERS = (1, 3, 5)  # of 5
DECAY = 0.8  # of the weight of each guess of a token further away


class Drafter(nn.Module):
    """One layer over embedding and features; parameters are named as in ``speculators``."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__()
        hidden, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
        self.dim = int(str(config["head_dim"]))
        self.eps, self.theta = float(str(config["rms_norm_eps"])), float(str(config["rope_theta"]))
        heads = int(str(config["num_attention_heads"])) * self.dim
        kv_heads = int(str(config["num_key_value_heads"])) * self.dim
        self.weights = nn.ParameterDict()
        for name, rows, columns in (
            ("fc", hidden, len(FEATURE_LAYERS) * hidden),
            ("q_proj", heads, 2 * hidden),
            ("k_proj", kv_heads, 2 * hidden),
            ("v_proj", kv_heads, 2 * hidden),
            ("o_proj", hidden, heads),
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
            ("lm_head", int(str(config["draft_vocab_size"])), hidden),
        ):
            self.weights[name] = nn.Parameter(torch.randn(rows, columns) * columns**-0.5)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
            self.weights[name] = nn.Parameter(torch.ones(hidden))

    def start_from(self, target: LlamaForCausalLM, rows_R: Tensor) -> None:
        """Begin as the target's last layer and head, with its last features as they are."""
        last, own, hidden = target.model.layers[-1], self.weights, target.config.hidden_size
        with torch.no_grad():
            own["fc"].zero_()[:, -hidden:] = torch.eye(hidden)
            own["lm_head"].copy_(target.lm_head.weight[rows_R])
            own["norm"].copy_(target.model.norm.weight)
            own["post_attention_layernorm"].copy_(last.post_attention_layernorm.weight)
            for name in ("gate_proj", "up_proj", "down_proj"):
                own[name].copy_(getattr(last.mlp, name).weight)
            own["o_proj"].zero_()

    def forward(self, embedded_BTD: Tensor, features_BTW: Tensor, num_steps: int) -> list[Tensor]:
        """Logits ``[B, T, R]`` of each step; row t of step s has the token at t + s.

        Step s sees the features up to the row's first position, and its own states behind them.
        """
        own, length = self.weights, features_BTW.shape[1]
        x = functional.linear(features_BTW, own["fc"])
        before = torch.ones(length, length, dtype=torch.bool).tril()
        kept: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(num_steps):
            embedded = functional.pad(embedded_BTD[:, step:], (0, 0, 0, step))
            h = torch.cat(
                [self._norm(embedded, "input_layernorm"), self._norm(x, "hidden_norm")], -1
            )
            q, k, v = (self._heads(h, name, step) for name in ("q_proj", "k_proj", "v_proj"))
            shared = q.shape[1] // k.shape[1]
            kept.append((k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
            scores = (q @ kept[0][0].mT).masked_fill(~before, -math.inf)
            of_own = [(q * each).sum(-1, keepdim=True) for each, _ in kept[1:]]
            shares = torch.softmax(torch.cat([scores, *of_own], -1) * self.dim**-0.5, -1)
            out = shares[..., :length] @ kept[0][1]
            for place, (_, value) in enumerate(kept[1:]):
                out = out + shares[..., length + place, None] * value
            x = x + functional.linear(out.transpose(1, 2).flatten(2), own["o_proj"])
            h = self._norm(x, "post_attention_layernorm")
            gate = functional.silu(functional.linear(h, own["gate_proj"]))
            inside = gate * functional.linear(h, own["up_proj"])
            x = x + functional.linear(inside, own["down_proj"])
            logits.append(functional.linear(self._norm(x, "norm"), own["lm_head"]))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a file."""
        places = {"o": "self_attn", "q": "self_attn", "k": "self_attn", "v": "self_attn"}
        found = {}
        for name, weight in self.weights.items():
            if name.endswith("_proj"):
                name = f"layers.0.{places.get(name.partition('_')[0], 'mlp')}.{name}"
            elif name not in ("fc", "norm", "lm_head"):
                name = f"layers.0.{name}"
            found[f"{name}.weight"] = weight.detach().contiguous()
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normed: Tensor = functional.rms_norm(x, x.shape[-1:], self.weights[name], self.eps)
        return normed

    def _heads(self, h: Tensor, name: str, step: int) -> Tensor:
        """``[B, H, T, d]``; q and k rotated by their positions, which each step moves on."""
        rows: Tensor = functional.linear(h, self.weights[name])
        rows = rows.view(*rows.shape[:2], -1, self.dim).transpose(1, 2)
        if name == "v_proj":
            return rows
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = (step + torch.arange(rows.shape[2]))[:, None] * frequencies.repeat(2)
        first, second = rows.chunk(2, -1)
        turned: Tensor = rows * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        return turned


def samples(num_texts: int, num_tokens: int, *, seed: int) -> Tensor:
    """Tokens ``[N, T]`` that the embedded model says, at a temperature of 1."""
    params = [
        SamplingParams(temperature=1.0, seed=seed + n, max_tokens=num_tokens - 1, ignore_eos=True)
        for n in range(num_texts)
    ]
    with LLM(max_model_len=num_tokens + 8) as llm:
        outputs = llm.generate([[0]] * num_texts, params)
    return torch.tensor([[0, *output.outputs[0].token_ids] for output in outputs])


def features_of(target: LlamaForCausalLM, token_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What a drafter reads, ``[B, T, W]``, and the target's logits ``[B, T, V]``."""
    kept: list[Tensor] = []
    hooks = [
        target.model.layers[layer - 1].register_forward_hook(
            lambda _m, _i, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in FEATURE_LAYERS
    ]
    with torch.no_grad():
        logits = target(token_ids_BT).logits
    for hook in hooks:
        hook.remove()
    return torch.cat(kept, -1), logits


Guesses = list[tuple[Tensor, Tensor, Tensor]]


def train_drafter(
    optimizer: torch.optim.Optimizer,
    token_ids_NT: Tensor,
    guesses_of: Callable[[Tensor], Guesses],
    *,
    num_steps: int,
    batch: int,
) -> None:
    """By cross-entropy with the target's probabilities, at the optimizer's rate after 20 steps.

    ``guesses_of`` some texts gives, for each distance, logits ``[B, T, R]``, the target's
    probabilities ``[B, T, R]``, and whether the likeliest tokens are the same ``[B, T]``.
    """
    (group,) = optimizer.param_groups
    rate, parameters = group["lr"], group["params"]
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / num_steps)
        chosen = torch.randint(len(token_ids_NT), (batch,), generator=generator)
        losses, agree = [], []
        for place, (logits, shares, is_right) in enumerate(guesses_of(token_ids_NT[chosen])):
            loss = -(shares * torch.log_softmax(logits, -1)).sum(-1).mean()
            losses.append(DECAY**place * loss)
            agree.append(is_right.float().mean().item())
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 20 == 0 or step == num_steps - 1:
            shown = " ".join(f"{each:.3f}" for each in agree)
            print(f"step {step}: loss {sum(losses):.3f}, agrees in {shown}", flush=True)


def train(
    drafter: Drafter,
    target: LlamaForCausalLM,
    token_ids_NT: Tensor,
    rows_R: Tensor,
    *,
    num_steps: int,
    batch: int,
    depth: int,
    rate: float,
) -> None:
    """On the target's probabilities of the drafter's tokens; mutates ``drafter``."""
    embedding = target.model.embed_tokens.weight.detach()

    def guesses_of(tokens_BT: Tensor) -> Guesses:
        features, target_logits = features_of(target, tokens_BT)
        found = []
        for place, logits in enumerate(
            drafter(embedding[tokens_BT[:, 1:]], features[:, :-1], depth)
        ):
            wanted = target_logits[:, 1 + place :, :]
            rows = logits[:, : wanted.shape[1]]
            shares = torch.softmax(wanted, -1)[..., rows_R]
            found.append((rows, shares, rows_R[rows.argmax(-1)] == wanted.argmax(-1)))
        return found

    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, betas=(0.9, 0.95))
    train_drafter(optimizer, token_ids_NT, guesses_of, num_steps=num_steps, batch=batch)


def main() -> None:
    """Train one as the options say, and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in (
        ("texts", 512), ("tokens", 128), ("steps", 400), ("batch", 8), ("depth", 3),
        ("vocabulary", 2048),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    target = LlamaForCausalLM.from_pretrained(locate_model(None), dtype=torch.float32)
    target.eval()  # type: ignore[no-untyped-call]
    token_ids_NT = samples(options.texts, options.tokens, seed=1000)
    common = Counter(token_ids_NT.flatten().tolist()).most_common(options.vocabulary)
    rows_R = torch.tensor(sorted(token for token, _ in common))
    shape = target.config
    layer = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{
            name: getattr(shape, name)
            for name in (
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size",
            )
        },
        "rope_theta": read_config(locate_model(None))["rope_theta"],
    }  # fmt: skip
    drafter = Drafter(layer | {"draft_vocab_size": len(rows_R)})
    drafter.start_from(target, rows_R)
    train(
        drafter, target, token_ids_NT, rows_R, num_steps=options.steps, batch=options.batch,
        depth=options.depth, rate=options.rate,
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(rows_R),
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "transformer_layer_config": layer,
    }
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = drafter.tensors() | {"d2t": rows_R - torch.arange(len(rows_R))}
    save_file(tensors, options.folder / "model.safetensors")


if __name__ == "__main__":
    main()
