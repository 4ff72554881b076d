"""The embedded model with an exit after its second layer: ``python -m recipes.layerskip FOLDER``.

All layers learn what the model said before, at the exit by the model's own last norm and head;
later layers are left out at random (LayerSkip, arXiv 2404.16710, sections 4.1 and 4.2, where text
itself is learnt).

Shapes: B windows, T positions, D hidden, V tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from recipes.drafting import (
    Guesses,
    guessing_loss,
    parse_options,
    probabilities,
    say_agreement,
    training_config,
    training_streams,
)
from recipes.embedded.export import export_model
from ridgeline.compress.pretrain import train
from ridgeline.compress.trainable import TrainableLlama, load_exported
from ridgeline.weights import locate_model

DROPOUT = 0.1  # of the last layer; of earlier ones less


def logits_with_exit(model: TrainableLlama, ids_BT: Tensor, exit_after: int) -> list[Tensor]:
    """Logits ``[B, T, V]`` after so many layers, and after all; in training with layer dropout."""
    body, (batch, length) = model.model, ids_BT.shape
    x_BTD, found = body.embed_tokens(ids_BT), []
    for number, layer in enumerate(body.layers, start=1):
        out_BTD = layer(x_BTD, body.cos_SE[:length], body.sin_SE[:length], body.mask_SS)
        if model.training:
            rate = DROPOUT * (2 ** ((number - 1) / (len(body.layers) - 1)) - 1)
            out_BTD = torch.where(torch.rand(batch, 1, 1) < rate, x_BTD, out_BTD)
        x_BTD = out_BTD
        if number in (exit_after, len(body.layers)):
            found.append(functional.linear(body.norm(x_BTD), body.embed_tokens.weight))
    return found


def main() -> None:
    """Train as the options say, and write the model's folder; a stopped run is gone on with."""
    options = parse_options(__doc__, exit=2)
    assets = locate_model(None)
    original, model = load_exported(assets).eval(), load_exported(assets)
    stable, decay = training_streams(
        options.folder / "training",
        num_documents=options.documents,
        num_texts=options.texts,
        length=options.tokens,
    )

    def of_original(ids_BT: Tensor) -> Guesses:
        shares = probabilities(original, ids_BT)
        return [(each, shares) for each in logits_with_exit(model, ids_BT, options.exit)]

    def of_itself(ids_BT: Tensor) -> Guesses:
        early, last = logits_with_exit(model, ids_BT, options.exit)
        return [(early, torch.softmax(last, -1))]

    train(
        model=model,
        loss_function=guessing_loss(of_original),
        stable=stable,
        decay=decay,
        config=training_config(options, muon=True, matrix_lr=0.006),
        folder=options.folder / "training",
    )
    export_model(model=model.eval(), tokenizer=assets, folder=options.folder)
    say_agreement({"exit": (of_itself, None)}, length=options.tokens, model=options.folder)


if __name__ == "__main__":
    main()
