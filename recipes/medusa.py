"""Medusa heads of the embedded model: ``python -m recipes.medusa FOLDER``.

Each begins as the model's own head and learns what the model says at its distance (arXiv
2401.10774, section 2.2.1), on what the model says itself; the model is not changed.

Shapes: T positions, D hidden, V tokens.
"""

import json

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


def heads_guesses(heads: Heads, target: TrainableLlama) -> Guesser:
    """What each head guesses."""

    def guesses_of(ids_BT: Tensor) -> Guesses:
        with torch.no_grad():
            hidden = target.model(ids_BT)
            logits = functional.linear(hidden, target.model.embed_tokens.weight)
            shares = torch.softmax(logits.float(), -1)
        wanted = [shares[:, 1 + place :] for place in range(heads.num_heads)]
        return [(each[:, : w.shape[1]], w) for each, w in zip(heads(hidden), wanted, strict=True)]

    return guesses_of


def main() -> None:
    """Train some as the options say, and write their folder; a stopped run is gone on with."""
    options = parse_options(__doc__, heads=3)
    target = load_exported(locate_model(None)).eval().requires_grad_(False)
    run = options.folder / "training"
    stable, decay = training_streams(
        run, num_documents=options.documents, num_texts=options.texts, length=options.tokens
    )
    heads = Heads(options.heads, target.model.embed_tokens.weight)
    guesser = heads_guesses(heads, target)
    train(
        model=heads,
        loss_function=guessing_loss(guesser),
        stable=stable,
        decay=decay,
        config=training_config(options, muon=False),
        folder=run,
    )
    config = {"medusa_num_heads": options.heads, "medusa_num_layers": 1}
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(heads.tensors(), options.folder / "model.safetensors")
    say_agreement({"Medusa": (guesser, None)}, length=options.tokens)


if __name__ == "__main__":
    main()
