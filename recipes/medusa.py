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

from recipes.eagle3 import samples
from ridgeline.weights import locate_model

DECAY = 0.8  # of the weight of each head that guesses further


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
    """By cross-entropy with the target's probabilities; mutates ``heads``."""
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / num_steps)
        chosen = torch.randint(len(token_ids_NT), (batch,), generator=generator)
        with torch.no_grad():
            hidden = target.model(token_ids_NT[chosen]).last_hidden_state
            wanted = torch.softmax(target.lm_head(hidden), -1)
        losses, agree = [], []
        for place, logits in enumerate(heads(hidden)):
            shares = wanted[:, 1 + place :]
            rows = logits[:, : shares.shape[1]]
            loss = -(shares * torch.log_softmax(rows, -1)).sum(-1).mean()
            losses.append(DECAY**place * loss)
            agree.append((rows.argmax(-1) == shares.argmax(-1)).float().mean().item())
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == num_steps - 1:
            shown = " ".join(f"{each:.3f}" for each in agree)
            print(f"step {step}: loss {sum(losses):.3f}, agrees in {shown}", flush=True)


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
