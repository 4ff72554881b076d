"""A small EAGLE-3 drafter of the embedded model: ``python -m recipes.eagle3 FOLDER``.

Trained on what the model says itself, from its first token on, by training-time test (arXiv
2503.01840, section 3.2): each row goes on with its own states for some steps, as it does when it
drafts. It has the most frequent tokens of these texts, and the model's embedding.

Shapes: T positions, D hidden, W = 3·D features, R rows of the drafter's head, H heads, d width.
"""

import json
import math
from collections import Counter

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from recipes.drafting import (
    Guesser,
    Guesses,
    guessing_loss,
    parse_options,
    say_agreement,
    training_config,
    training_streams,
)
from ridgeline.compress.pretrain import train
from ridgeline.compress.trainable import TrainableLlama, load_exported
from ridgeline.weights import locate_model

FEATURE_LAYERS = (1, 3, 5)  # of 5


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

    def start_from(self, target: TrainableLlama, rows_R: Tensor) -> None:
        """Begin as the target's last layer and head, with its last features as they are."""
        last, own = target.model.layers[-1].state_dict(), self.weights
        hidden = target.shape.hidden_size
        with torch.no_grad():
            own["fc"].zero_()[:, -hidden:] = torch.eye(hidden)
            own["lm_head"].copy_(target.model.embed_tokens.weight[rows_R])
            own["norm"].copy_(target.model.norm.weight)
            own["post_attention_layernorm"].copy_(last["post_attention_layernorm.weight"])
            for name in ("gate_proj", "up_proj", "down_proj"):
                own[name].copy_(last[f"mlp.{name}.weight"])
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


def features_of(target: TrainableLlama, token_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What a drafter reads, ``[B, T, W]``, and the target's logits ``[B, T, V]``."""
    kept: list[Tensor] = []
    hooks = [
        target.model.layers[layer - 1].register_forward_hook(lambda _m, _i, out: kept.append(out))
        for layer in FEATURE_LAYERS
    ]
    with torch.no_grad():
        logits = target(token_ids_BT)
    for hook in hooks:
        hook.remove()
    return torch.cat(kept, -1), logits


def drafter_guesses(drafter: Drafter, target: TrainableLlama, depth: int) -> Guesser:
    """What the drafter guesses of ``depth`` tokens, among those that it has."""
    embedding = target.model.embed_tokens.weight.detach()

    def guesses_of(ids_BT: Tensor) -> Guesses:
        features, target_logits = features_of(target, ids_BT)
        shares = torch.softmax(target_logits.float(), -1)
        steps = drafter(embedding[ids_BT[:, 1:]], features[:, :-1], depth)
        wanted = [shares[:, 1 + place :] for place in range(depth)]
        return [(each[:, : w.shape[1]], w) for each, w in zip(steps, wanted, strict=True)]

    return guesses_of


def main() -> None:
    """Train one as the options say, and write its folder; a stopped run is gone on with."""
    options = parse_options(__doc__, depth=3, vocabulary=2048)
    target = load_exported(locate_model(None)).eval().requires_grad_(False)
    run = options.folder / "training"
    stable, decay = training_streams(
        run, num_documents=options.documents, num_texts=options.texts, length=options.tokens
    )
    common = Counter(stable.ids.tolist()).most_common(options.vocabulary)
    rows_R = torch.tensor(sorted(token for token, _ in common))
    layer = target.shape.hf_config(bos_token_id=0, eos_token_ids=[0]) | {"num_hidden_layers": 1}
    drafter = Drafter(layer | {"draft_vocab_size": len(rows_R)})
    drafter.start_from(target, rows_R)
    guesser = drafter_guesses(drafter, target, options.depth)
    train(
        model=drafter,
        loss_function=guessing_loss(guesser, rows_R),
        stable=stable,
        decay=decay,
        config=training_config(options, muon=True),
        folder=run,
    )
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(rows_R),
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "transformer_layer_config": layer,
    }
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = drafter.tensors() | {"d2t": rows_R - torch.arange(len(rows_R))}
    save_file(tensors, options.folder / "model.safetensors")
    say_agreement({"EAGLE-3": (guesser, rows_R)}, length=options.tokens)


if __name__ == "__main__":
    main()
