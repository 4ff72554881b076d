"""Medusa heads of the embedded model: ``python -m recipes.medusa FOLDER``.

Each begins as the model's own head and learns what the model says at its distance (arXiv
2401.10774, section 2.2.1), on what the model says itself; the model is not changed.

Shapes: T positions, D hidden, V tokens.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from recipes.eagle3 import Guesses, samples, train_drafter
from ridgeline.weights import locate_model


class Heads(nn.Module):
    """One block and one matrix each; parameters are named as the authors do."""

    def __init__(self, num_heads: int, head_VD: Tensor) -> None:
        super().__init__()
        hidden = head_VD.shape[1]
        self.num_heads = num_heads
        self.weights = nn.ParameterDict()
        for head in range(num_heads):
            self.weights[f"{head}:0:linear:weight"] = nn.Parameter(torch.zeros(hidden, hidden))
            self.weights[f"{head}:0:linear:bias"] = nn.Parameter(torch.zeros(hidden))
            self.weights[f"{head}:1:weight"] = nn.Parameter(head_VD.detach().clone())

    def forward(self, hidden_BTD: Tensor) -> list[Tensor]:
        """Logits ``[B, T, V]`` of each head; that of number n guesses the token at t + 2 + n."""
        logits = []
        for head in range(self.num_heads):
            weight, bias, out = (
                self.weights[f"{head}:{name}"] for name in ("0:linear:weight", "0:linear:bias",
                                                             "1:weight")
            )  # fmt: skip
            inner = functional.silu(functional.linear(hidden_BTD, weight, bias))
            logits.append(functional.linear(hidden_BTD + inner, out))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a file."""
        return {
            name.replace(":", "."): weight.detach().contiguous()
            for name, weight in self.weights.items()
        }


def train(
    heads: Heads,
    target: LlamaForCausalLM,
    token_ids_NT: Tensor,
    *,
    num_steps: int,
    batch: int,
    rate: float,
) -> None:
    """On the target's probabilities; mutates ``heads``."""

    def guesses_of(tokens_BT: Tensor) -> Guesses:
        with torch.no_grad():
            hidden = target.model(tokens_BT).last_hidden_state
            wanted = torch.softmax(target.lm_head(hidden), -1)
        found = []
        for place, logits in enumerate(heads(hidden)):
            shares = wanted[:, 1 + place :]
            rows = logits[:, : shares.shape[1]]
            found.append((rows, shares, rows.argmax(-1) == shares.argmax(-1)))
        return found

    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    train_drafter(optimizer, token_ids_NT, guesses_of, num_steps=num_steps, batch=batch)


def main() -> None:
    """Train some as the options say, and write their folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in (
        ("heads", 3), ("texts", 256), ("tokens", 128), ("steps", 200), ("batch", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    target = LlamaForCausalLM.from_pretrained(locate_model(None), dtype=torch.float32)
    target.eval()  # type: ignore[no-untyped-call]
    token_ids_NT = samples(options.texts, options.tokens, seed=1000)
    heads = Heads(options.heads, target.lm_head.weight)
    train(
        heads, target, token_ids_NT,
        num_steps=options.steps, batch=options.batch, rate=options.rate,
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": options.heads, "medusa_num_layers": 1}
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(heads.tensors(), options.folder / "model.safetensors")


if __name__ == "__main__":
    main()
